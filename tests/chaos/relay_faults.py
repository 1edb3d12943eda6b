"""Faults of one relay: of its process, and of its connections to the broker and to the database."""

import asyncio
from contextlib import suppress
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import psycopg
from pamqp.commands import Basic

from tests.chaos.fleet import Fleet, FleetRelay
from tests.chaos.kinds import FaultKind, Planned
from tests.faults.history import Reach
from tests.support.proxy import Act, FaultProxy, Way

DELAY = 0.1  # seconds, each way
FIRES_WITHIN = 3.0  # seconds in which there is a frame to act on, while anything is sent
LARGEST_CUT = 5000  # bytes

END_SESSION = """
    SELECT pg_terminate_backend(backend_pid) FROM outbox.node WHERE name = %s AND heartbeat_at > now() - interval '20 s'
"""


async def kill(fleet: Fleet, planned: Planned) -> None:
    victim = _relay(fleet, planned).victim
    await asyncio.to_thread(victim.stop, SIGKILL)
    await asyncio.sleep(planned.seconds)
    await victim.start()


async def freeze(fleet: Fleet, planned: Planned) -> None:
    victim = _relay(fleet, planned).victim
    victim.tell(SIGSTOP)
    try:
        await asyncio.sleep(planned.seconds)
    finally:
        victim.tell(SIGCONT)


async def roll(fleet: Fleet, planned: Planned) -> None:
    victim = _relay(fleet, planned).victim
    code = await asyncio.to_thread(victim.stop, SIGTERM)
    if code != 0:
        fleet.complaints.append(f"{planned.what}: after SIGTERM it ended with code {code}")
    await victim.start()


async def end_session(fleet: Fleet, planned: Planned) -> None:
    with suppress(psycopg.OperationalError):  # the server is unreachable, and the session with it
        async with await fleet.connect() as connection:
            await connection.execute(END_SESSION, [planned.relay])


async def reset(fleet: Fleet, planned: Planned) -> None:
    _relay(fleet, planned).broker.cut(Act.RESET)


async def mute_broker(fleet: Fleet, planned: Planned) -> None:
    """Everything arrives at the broker, and no answer comes back."""
    broker = _relay(fleet, planned).broker
    broker.hold(Way.DOWN)
    await asyncio.sleep(planned.seconds)
    broker.release(Way.DOWN)


async def cut_off_from_broker(fleet: Fleet, planned: Planned) -> None:
    await _silence(_relay(fleet, planned).broker, planned.seconds)


async def cut_off_from_database(fleet: Fleet, planned: Planned) -> None:
    await _silence(_relay(fleet, planned).database, planned.seconds)


async def refuse_by_broker(fleet: Fleet, planned: Planned) -> None:
    await _refuse(_relay(fleet, planned).broker, planned.seconds)


async def refuse_by_database(fleet: Fleet, planned: Planned) -> None:
    await _refuse(_relay(fleet, planned).database, planned.seconds)


async def delay(fleet: Fleet, planned: Planned) -> None:
    broker = _relay(fleet, planned).broker
    broker.delay = dict.fromkeys(Way, DELAY)
    await asyncio.sleep(planned.seconds)
    broker.delay = dict.fromkeys(Way, 0.0)


async def cut_a_frame(fleet: Fleet, planned: Planned) -> None:
    broker = _relay(fleet, planned).broker
    broker.cut_after(Way.UP, planned.chance().randrange(1, LARGEST_CUT))
    await _await_fired(broker)


async def lose_a_confirm(fleet: Fleet, planned: Planned) -> None:
    """End the connection before the next confirm passes, so that a stored message is not confirmed."""
    await _at_next_confirm(_relay(fleet, planned).broker, Act.RESET)


async def withhold_confirms(fleet: Fleet, planned: Planned) -> None:
    broker = _relay(fleet, planned).broker
    await _at_next_confirm(broker, Act.HOLD)
    await asyncio.sleep(planned.seconds)
    broker.release(Way.DOWN)


def _relay(fleet: Fleet, planned: Planned) -> FleetRelay:
    return fleet.relays[planned.relay]


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
    FaultKind("kill", kill, Reach.ALL, forgets=True, seconds=(0.0, 2.0)),
    FaultKind("freeze", freeze, Reach.ALL, forgets=True, seconds=(3.0, 15.0)),
    FaultKind("roll", roll, Reach.ALL, forgets=False),
    FaultKind("end the session of", end_session, Reach.ALL, forgets=True),
    FaultKind("reset the connection of", reset, Reach.ALL, forgets=True),
    FaultKind("let no answer of the broker reach", mute_broker, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    FaultKind("cut off from the broker", cut_off_from_broker, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    FaultKind("cut off from the database", cut_off_from_database, Reach.ALL, forgets=True, seconds=(2.0, 12.0)),
    FaultKind("refuse, as the broker,", refuse_by_broker, Reach.ALL, forgets=True, seconds=(1.0, 6.0)),
    FaultKind("refuse, as the database,", refuse_by_database, Reach.ALL, forgets=True, seconds=(1.0, 6.0)),
    FaultKind("delay the broker for", delay, Reach.A_MOMENT, forgets=False, seconds=(2.0, 8.0)),
    FaultKind("cut a frame of", cut_a_frame, Reach.ALL, forgets=True),
    FaultKind("lose a confirm for", lose_a_confirm, Reach.ALL, forgets=True),
    FaultKind("withhold confirms from", withhold_confirms, Reach.ALL, forgets=True, seconds=(1.0, 4.0)),
]
