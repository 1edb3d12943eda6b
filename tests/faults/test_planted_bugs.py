"""A planted bug makes the checker find the invariant that it breaks; without the bug every invariant is valid.

The relay is the real one, on real servers, with one small piece replaced.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import aio_pika
import psycopg
import pytest
from pamqp.commands import Basic
from pamqp.common import FieldTable

from relay.config.settings import Settings
from relay.engine.read.positions import OpenTransactions, Positions
from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.frames import FrameWire
from relay.engine.send.sender import Sender
from tests.faults.checker import SENDING, Findings, Invariant, assert_valid, invalid, report
from tests.faults.history import Nacked, Returned
from tests.faults.scene import QUEUE, Scene, scene
from tests.support.eventually import eventually
from tests.support.proxy import Act, Way

LATER = "later"  # a queue that is declared only after something was returned
ONE_PLACE: FieldTable = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
PATIENCE = 4.0  # seconds; only a row that nobody moves takes them, as with some of the bugs


def mark_before_the_confirm(patch: pytest.MonkeyPatch) -> None:
    send = FrameWire.send

    def send_and_settle(self: FrameWire, rows: Iterable[Row], redelivered: set[int]) -> None:
        given = list(rows)
        send(self, given, redelivered)
        self._rows.clear()
        self._loop.call_soon(self._settle, Settled(given, Outcome.CONFIRMED))

    patch.setattr(FrameWire, "send", send_and_settle)


def ignore_returns(patch: pytest.MonkeyPatch) -> None:
    settle_as(patch, Outcome.RETURNED, Outcome.CONFIRMED)


def skip_by_position(patch: pytest.MonkeyPatch) -> None:
    """Never read again: a row that commits behind a higher id is not seen."""
    patch.setattr(OpenTransactions, "floor", lambda *_: 1 << 62)
    patch.setattr(Positions, "plan_again", lambda *_: None)
    patch.setattr(Positions, "reread_from", lambda *_: None)


def send_behind_a_nack(patch: pytest.MonkeyPatch) -> None:
    settle = Sender.settle

    def settle_and_release(self: Sender, settled: Settled) -> None:
        if settled.outcome is Outcome.NACKED:
            for row in settled.rows:
                waiting = self.queue.keys._behind.get(row.key) if row.key else None
                if waiting:
                    self.queue.ready.extend(waiting)
                    waiting.clear()
        settle(self, settled)

    patch.setattr(Sender, "settle", settle_and_release)


def burn_attempts_by_nacks(patch: pytest.MonkeyPatch) -> None:
    settle_as(patch, Outcome.NACKED, Outcome.REFUSED)


def settle_as(patch: pytest.MonkeyPatch, outcome: Outcome, other: Outcome) -> None:
    settle = Sender.settle

    def settle_wrongly(self: Sender, settled: Settled) -> None:
        settle(self, settled._replace(outcome=other) if settled.outcome is outcome else settled)

    patch.setattr(Sender, "settle", settle_wrongly)


async def lose_the_confirms(scene: Scene) -> None:
    """The connection is reset when the first confirm is on its way back."""
    scene.recorder.on_frame(Way.DOWN, Basic.Ack, 1, Act.RESET)
    await scene.write("a", "b", "c", "d")
    async with asyncio.timeout(20):
        await scene.recorder.fired.wait()


async def bind_late(scene: Scene) -> None:
    """One message is returned until there is a queue for it."""
    await scene.write("a", exchange="", routing_key=LATER)
    await scene.write("a", "b", "b")
    await eventually(lambda: scene.times(Returned) > 0, "it is returned")
    await scene.channel.declare_queue(LATER, durable=True)


async def commit_late(scene: Scene) -> None:
    """A message commits when one with a higher id is long delivered."""

    async def one_is_sent() -> bool:
        await scene.write("early")  # more than one: the planted bug may skip it, too
        return "sent" in (await scene.states()).values()

    async with await psycopg.AsyncConnection.connect(scene.settings.database.url.get_secret_value()) as slow:
        late = await scene.insert(slow, "late")
        await eventually(one_is_sent, "an early one is sent")
        await slow.commit()
    scene.history.append(late)


async def fill_the_queue(scene: Scene) -> None:
    """The queue's only place is taken: the broker nacks until the drill removes that message."""
    await scene.channel.default_exchange.publish(aio_pika.Message(b"not ours"), QUEUE)
    await scene.write("a", "a", "b")
    await eventually(lambda: scene.times(Nacked) >= 3, "it nacks")
    queue = await scene.channel.get_queue(QUEUE)
    await queue.get(no_ack=True)


class PlantedBug(NamedTuple):
    """A fault, a bug that does harm under it, and what is then violated."""

    fault: Callable[[Scene], Awaitable[None]]
    plant: Callable[[pytest.MonkeyPatch], None]
    violated: set[Invariant]


DRILLS = [
    PlantedBug(lose_the_confirms, mark_before_the_confirm, {Invariant.SENT_IS_CONFIRMED}),
    PlantedBug(bind_late, ignore_returns, {Invariant.NOTHING_LOST, Invariant.SENT_IS_CONFIRMED, Invariant.IN_ORDER}),
    PlantedBug(commit_late, skip_by_position, {Invariant.NOTHING_LOST}),
    PlantedBug(fill_the_queue, send_behind_a_nack, {Invariant.IN_ORDER}),
    PlantedBug(fill_the_queue, burn_attempts_by_nacks, {Invariant.NO_ATTEMPT_BURNT}),
]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.plant.__name__)
async def test_a_bug_turns_its_invariant_red(
    settings: Settings, drill: PlantedBug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug is planted into the relay; under a fault, the checker finds the invariant that the bug breaks."""
    drill.plant(monkeypatch)

    findings = await run(drill.fault, settings, PATIENCE)

    found = invalid(findings)
    assert found == drill.violated, report(findings, found | drill.violated)


@pytest.mark.parametrize("fault", dict.fromkeys(drill.fault for drill in DRILLS), ids=lambda fault: fault.__name__)
async def test_without_the_bug_all_are_valid(settings: Settings, fault: Callable[[Scene], Awaitable[None]]) -> None:
    """The same faults hit a relay without a bug; every invariant is valid."""
    findings = await run(fault, settings, 60)

    assert_valid(findings, *SENDING)


async def run(fault: Callable[[Scene], Awaitable[None]], settings: Settings, within: float) -> Findings:
    arguments = ONE_PLACE if fault is fill_the_queue else None
    more_queues = [LATER] if fault is bind_late else []
    async with scene(settings, more_queues=more_queues, arguments=arguments) as stage, stage.relay():
        await fault(stage)
        return await stage.checker.ask(within=within)
