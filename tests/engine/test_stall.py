"""Rows that wait while no row settles are a stall; idleness, and rows that wait for their own fault, are not."""

import time
from types import SimpleNamespace
from typing import cast

from relay.config.settings import RelaySettings
from relay.engine.nodes.stall import StallWatch
from relay.engine.row import Outcome, Settled
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from relay.engine.settle.mark import Delivered
from relay.runtime.health import TOLD_REASONS, Health
from tests.engine.follower import IN_ORDER
from tests.engine.recording_wire import RecordingWire
from tests.engine.rows import rows

HOUR = 3600


class Watched:
    """A watch whose time the test makes pass, over a sender whose outcomes it chooses."""

    def __init__(self) -> None:
        settings = RelaySettings(stall_after=5, heartbeat_interval=1)
        self.sender, self.wire, self.health = Sender(IN_ORDER, settings.max_in_flight), RecordingWire(), Health()
        self.sender.attach(self.wire)
        self.delivered = Delivered()
        self.session: LaneSession | None = None
        self.watch = StallWatch(self.sender, self.delivered, self.health, settings, session=lambda: self.session)
        self.now = time.monotonic()
        self.open_session()

    def open_session(self) -> None:
        self.session = cast(LaneSession, SimpleNamespace(written_at=self.now))

    def passes(self, seconds: float, *, answering: bool = True) -> str:
        """Let time pass, with a look each half second; give the state then."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            if answering and self.session is not None:
                self.session.written_at = self.now
            self.watch.look(self.now)
        return self.health.state

    def settle(self, outcome: Outcome) -> None:
        settled, self.wire.open = self.wire.open, []
        self.sender.settle(Settled(settled, outcome, "in the broker's words"))

    async def mark(self) -> None:
        """As the marker does."""
        await self.sender.wait_settled()
        confirmed, _ = self.sender.take_settled()
        self.delivered.add(len(confirmed))
        self.sender.stop()
        await self.sender.wait_settled()


async def test_a_long_idle_is_no_stall() -> None:
    watched = Watched()

    assert watched.passes(HOUR) == "ok"
    assert watched.health.hindrances == {}


async def test_rows_that_nobody_confirms_are_one_within_ten_seconds_and_until_one_settles() -> None:
    watched = Watched()
    watched.passes(HOUR)
    watched.sender.offer(rows([1, 2]))

    assert watched.passes(5) == "ok"
    assert watched.passes(1) == "stalled"
    assert watched.health.hindrances == {"delivery": "nothing has settled for 6 s, messages that wait: 2"}
    assert watched.health.reasons == ["delivery: nothing has settled for 6 s, messages that wait: 2"]
    watched.settle(Outcome.CONFIRMED)
    await watched.mark()
    assert watched.passes(0.5) == "ok"
    assert watched.passes(HOUR) == "ok"


async def test_rows_that_the_broker_refuses_for_now_wait_too() -> None:
    watched = Watched()
    watched.sender.offer(rows([1]))
    watched.settle(Outcome.NACKED)

    assert watched.passes(6) == "stalled"


async def test_a_row_that_backs_off_for_a_fault_of_its_own_is_none() -> None:
    watched = Watched()
    faulty, follower = rows([1, 1])
    watched.sender.offer([faulty, follower])
    watched.settle(Outcome.REFUSED)
    watched.sender.take_settled()
    assert watched.sender.queue.put_off(faulty) == [follower]

    assert watched.passes(60) == "ok"


async def test_a_moment_in_which_no_row_waits_does_not_end_one() -> None:
    """As between the time-out of the confirms, which quarantines the route, and the probe of that route."""
    watched = Watched()
    row, probe = rows([1, 2])
    watched.sender.offer([row])
    watched.passes(4.5)
    watched.settle(Outcome.REFUSED)
    watched.sender.take_settled()
    watched.sender.queue.put_off(row)
    watched.passes(0.5)
    watched.sender.offer([probe])

    assert watched.passes(0.5) == "stalled"


async def test_rows_that_are_confirmed_and_cannot_be_marked_are_one() -> None:
    watched = Watched()
    watched.sender.offer(rows([1]))
    watched.settle(Outcome.CONFIRMED)
    watched.sender.take_settled()

    assert watched.passes(6) == "stalled"


async def test_rows_of_a_lost_session_still_wait_also_while_sessions_come_and_go() -> None:
    watched = Watched()
    watched.sender.offer(rows([1]))
    watched.passes(1)
    watched.settle(Outcome.UNKNOWN)
    watched.wire.open.clear()
    watched.sender.in_flight = 0
    await watched.sender.abandon()

    for _ in range(6):
        watched.session = None
        watched.passes(0.5)
        watched.open_session()
        watched.passes(0.5)

    assert watched.health.state == "stalled"
    assert watched.passes(3) == "ok"  # the new session stays, and finds nothing that waits


async def test_a_database_that_does_not_answer_is_told_before_any_time_out() -> None:
    watched = Watched()

    assert watched.passes(6, answering=False) == "ok"
    assert watched.passes(1, answering=False) == "degraded"
    assert watched.health.hindrances == {"database": "it has not answered for more than 6 s"}
    assert watched.passes(0.5) == "ok"


async def test_a_session_that_waits_for_its_name_answers_and_writes_nothing() -> None:
    watched = Watched()
    session = watched.session = cast(LaneSession, SimpleNamespace(written_at=0.0, answered_at=watched.now))

    for _ in range(HOUR):
        session.answered_at = watched.now
        assert watched.passes(1, answering=False) == "ok"

    assert watched.passes(7, answering=False) == "degraded"


async def test_a_queue_that_takes_nothing_is_a_reason_to_look_and_none_to_be_unready() -> None:
    health = Health()

    health.degrade("queues", "no quorum")

    assert (health.state, health.reasons, health.hindrances) == ("degraded", ["queues: no quorum"], {})


async def test_a_reason_that_changes_all_the_time_fills_no_memory() -> None:
    health = Health()

    for port in range(10_000):
        health.degrade("broker", f"port {port} is closed")

    assert len(health._told["broker"]) == TOLD_REASONS
    assert health.reasons == ["broker: port 9999 is closed"]
