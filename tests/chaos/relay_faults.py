"""What befalls one relay: its process, and its ways to the broker and to the database."""

import asyncio
from contextlib import suppress
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import psycopg
from pamqp.commands import Basic

from tests.chaos.kinds import Kind, Planned
from tests.chaos.stand import Relay, Stand
from tests.faults.history import Reach
from tests.support.proxy import Act, FaultProxy, Way

DELAY = 0.1  # seconds, each way
FIRES_WITHIN = 3.0  # seconds in which there is a frame to act on, while anything is sent
LARGEST_CUT = 5000  # bytes

END_SESSION = """
    SELECT pg_terminate_backend(backend_pid) FROM outbox.node WHERE name = %s AND heartbeat_at > now() - interval '20 s'
"""


async def kill(stand: Stand, planned: Planned) -> None:
    victim = _relay(stand, planned).victim
    await asyncio.to_thread(victim.stop, SIGKILL)
    await asyncio.sleep(planned.seconds)
    await victim.start()


async def freeze(stand: Stand, planned: Planned) -> None:
    victim = _relay(stand, planned).victim
    victim.tell(SIGSTOP)
    try:
        await asyncio.sleep(planned.seconds)
    finally:
        victim.tell(SIGCONT)


async def roll(stand: Stand, planned: Planned) -> None:
    victim = _relay(stand, planned).victim
    code = await asyncio.to_thread(victim.stop, SIGTERM)
    if code != 0:
        stand.complaints.append(f"{planned.what}: after SIGTERM it ended with code {code}")
    await victim.start()


async def end_session(stand: Stand, planned: Planned) -> None:
    with suppress(psycopg.OperationalError):  # the server is away, and the session with it
        async with await stand.connect() as connection:
            await connection.execute(END_SESSION, [planned.relay])


async def reset(stand: Stand, planned: Planned) -> None:
    _relay(stand, planned).broker.cut(Act.RESET)


async def mute_broker(stand: Stand, planned: Planned) -> None:
    """Nothing comes back, though everything arrives."""
    broker = _relay(stand, planned).broker
    broker.hold(Way.DOWN)
    await asyncio.sleep(planned.seconds)
    broker.release(Way.DOWN)


async def cut_off_from_broker(stand: Stand, planned: Planned) -> None:
    await _silence(_relay(stand, planned).broker, planned.seconds)


async def cut_off_from_database(stand: Stand, planned: Planned) -> None:
    await _silence(_relay(stand, planned).database, planned.seconds)


async def refuse_by_broker(stand: Stand, planned: Planned) -> None:
    await _refuse(_relay(stand, planned).broker, planned.seconds)


async def refuse_by_database(stand: Stand, planned: Planned) -> None:
    await _refuse(_relay(stand, planned).database, planned.seconds)


async def delay(stand: Stand, planned: Planned) -> None:
    broker = _relay(stand, planned).broker
    broker.delay = dict.fromkeys(Way, DELAY)
    await asyncio.sleep(planned.seconds)
    broker.delay = dict.fromkeys(Way, 0.0)


async def cut_a_frame(stand: Stand, planned: Planned) -> None:
    broker = _relay(stand, planned).broker
    broker.cut_after(Way.UP, planned.chance().randrange(1, LARGEST_CUT))
    await _await_fired(broker)


async def lose_a_confirm(stand: Stand, planned: Planned) -> None:
    """What was stored is not confirmed: the connection ends before the next confirm passes."""
    await _at_next_confirm(_relay(stand, planned).broker, Act.RESET)


async def withhold_confirms(stand: Stand, planned: Planned) -> None:
    broker = _relay(stand, planned).broker
    await _at_next_confirm(broker, Act.HOLD)
    await asyncio.sleep(planned.seconds)
    broker.release(Way.DOWN)


def _relay(stand: Stand, planned: Planned) -> Relay:
    return stand.relays[planned.relay]


async def _silence(proxy: FaultProxy, seconds: float) -> None:
    for way in Way:
        proxy.hold(way)
    await asyncio.sleep(seconds)
    proxy.cut()
    for way in Way:
        proxy.release(way)


async def _refuse(proxy: FaultProxy, seconds: float) -> None:
    proxy.refusing = True
    proxy.cut()
    await asyncio.sleep(seconds)
    proxy.refusing = False


async def _at_next_confirm(broker: FaultProxy, act: Act) -> None:
    broker.on_frame(Way.DOWN, Basic.Ack, broker.seen[Way.DOWN, Basic.Ack] + 1, act)
    await _await_fired(broker)


async def _await_fired(broker: FaultProxy) -> None:
    with suppress(TimeoutError):  # nothing was sent
        async with asyncio.timeout(FIRES_WITHIN):
            await broker.fired.wait()
    broker.disarm()


KINDS = [
    Kind("kill", kill, Reach.ALL, forgets=True, seconds=(0.0, 2.0)),
    Kind("freeze", freeze, Reach.ALL, forgets=True, seconds=(3.0, 15.0)),
    Kind("roll", roll, Reach.ALL, forgets=False),
    Kind("end the session of", end_session, Reach.ALL, forgets=True),
    Kind("reset the connection of", reset, Reach.ALL, forgets=True),
    Kind("let no answer of the broker reach", mute_broker, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    Kind("cut off from the broker", cut_off_from_broker, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    Kind("cut off from the database", cut_off_from_database, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    Kind("refuse, as the broker,", refuse_by_broker, Reach.ALL, forgets=True, seconds=(1.0, 6.0)),
    Kind("refuse, as the database,", refuse_by_database, Reach.ALL, forgets=True, seconds=(1.0, 6.0)),
    Kind("delay the broker for", delay, Reach.A_MOMENT, forgets=False, seconds=(2.0, 8.0)),
    Kind("cut a frame of", cut_a_frame, Reach.ALL, forgets=True),
    Kind("lose a confirm for", lose_a_confirm, Reach.ALL, forgets=True),
    Kind("withhold confirms from", withhold_confirms, Reach.ALL, forgets=True, seconds=(1.0, 4.0)),
]
