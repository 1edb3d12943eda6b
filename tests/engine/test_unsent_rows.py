"""Rows that wait for an answer about their exchange, or in line for a full queue, leave in order per key, each once."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from relay.config.settings import KeyPolicy, Ordering
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Address, Key, Outcome, Row, Settled
from relay.engine.send import backpressure, exchange_checks, sender, wire
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Router
from relay.engine.send.sender import Sender
from tests.engine.recording_wire import RecordingWire
from tests.engine.rows import ROW

ROUTER = Router((), "e9")
MISSING = "404 NOT_FOUND - no exchange '{}' in vhost '/'"


class Questions:
    """A prober that is asked, and does not answer."""

    def __init__(self) -> None:
        self.router = ROUTER
        self.asked: list[tuple[Address, bool]] = []

    def ask(self, address: Address, _: Callable[[str], None], *, at_once: bool) -> None:
        self.asked.append((address, at_once))


def test_only_questions_for_the_exchanges_of_the_settings_pass_others() -> None:
    """The row that asks first; those for topics are as many as the routing keys."""
    prober = Questions()
    checks = exchange_checks.ExchangeChecks(lambda _: None)
    checks.begin(Address(b"e9", b"secret"), "ACCESS_REFUSED - access to topic 'secret' in exchange 'e9' in vhost '/'")
    rows = [(b"e1", b"k"), (b"e9", b"k"), (None, b"l"), (b"e2", b"k"), (None, b"l")]
    for n, (exchange, key) in enumerate(rows):
        row = ROW._replace(id=n, aggregate_id=None, exchange=exchange, routing_key=key)
        assert not checks.lets_go(row, cast("Prober", prober))
    topics = [(Address(b"e9", b"k"), False), (Address(b"e9", b"l"), False)]
    assert prober.asked == [(Address(b"e1", b"k"), False), *topics, (Address(b"e2", b"k"), False)]

    prober.asked.clear()
    checks = exchange_checks.ExchangeChecks(lambda _: None)
    checks.begin(Address(b"e0", b"k"), MISSING.format("e0"))
    checks.lets_go(ROW._replace(aggregate_id=None, exchange=b"e9", routing_key=b"k"), cast("Prober", prober))
    assert prober.asked == [(Address(b"e9", b"k"), True)]


@pytest.mark.parametrize("key_policy", KeyPolicy)
async def test_pipelined_rows_not_in_flight_wait_for_the_refused_one_of_their_key(
    key_policy: KeyPolicy,
) -> None:
    rows = rows_of([(0, 0), (1, 4), (1, 1), (1, 4), (1, 9), (2, 4), (1, 4)])
    broker = Broker(DeliveryPolicy.of(Ordering.PIPELINED, key_policy), 100, rows)
    broker.connect()
    broker.offer(1)
    broker.take()  # it closes the channel: from now on the relay asks
    broker.write()
    broker.offer(5)
    broker.answer(0)  # e4: the second and the sixth row go
    broker.answer(0)  # e1 is missing
    broker.offer(1)
    while broker.questions:
        broker.answer(0)
    sent_first = [row.id for row in broker.wire.open]
    broker.write()

    holds = key_policy is KeyPolicy.HOLD
    assert sent_first == ([2, 6] if holds else [2, 6, 4, 5, 7])
    assert [row.id for row in broker.aside] == ([1, 3, 4, 5, 7] if holds else [1, 3])


class Broker:
    """A broker without a server, and the sender that uses it."""

    def __init__(self, policy: DeliveryPolicy, max_in_flight: int, rows: Sequence[Row]) -> None:
        self.policy = policy
        self.rows = rows
        self.offered = 0  # of them
        self.max_in_flight = max_in_flight
        self.router = ROUTER  # as a prober's
        self.missing = {b"e0", b"e1", b"e2"}
        self.wire = RecordingWire()
        self.sent: set[int] = set()
        self.questions: list[tuple[Address, Callable[[str], None]]] = []
        self.left: list[Row] = []  # in the order in which they got to the broker for the first time
        self.aside: list[Row] = []
        self.marked: set[int] = set()
        self.refused: set[int] = set()  # pipelined rows may pass these; a lost session may offer them once more
        self.may_send = True
        self.is_connected = False
        self.barred = 0
        self.lost: set[int] = set()  # were in flight as their channel went away
        self.again: set[int] = set()  # of these, those that were not sent again
        self.sender = Sender(policy, max_in_flight)
        self.sender.send_while(lambda: self.may_send)

    def ask(self, address: Address, done: Callable[[str], None], *, at_once: bool) -> None:
        assert at_once is (address.exchange == b"e9")
        self.questions.append((address, done))

    def give_up(self) -> None:
        """Nothing: no row goes out alone here."""

    def answer(self, which: int, *, in_time: bool = True) -> None:
        if self.questions:
            address, done = self.questions.pop(which % len(self.questions))
            is_missing = in_time and address.exchange in self.missing
            done(MISSING.format(address.exchange.decode()) if is_missing else "")
            self.note_refused()

    def connect(self) -> None:
        if not self.is_connected:
            self.sender.attach_prober(cast("Prober", self))
        self.is_connected = True
        self.open_channel()

    def open_channel(self) -> None:
        self.sender.attach(cast("wire.Wire", self))

    def send(self, rows: Iterable[Row], redelivered: set[int]) -> None:
        """Send rows, as a wire does."""
        assert self.may_send
        for row in rows:
            assert row.id not in self.sent or row.id in self.again, f"{row.id} was sent twice"
            self.sent.add(row.id)
            self.again.discard(row.id)
        self.wire.send(rows, redelivered)

    def lose_connection(self) -> None:
        self.close_channel()
        self.sender.attach_prober(None)
        self.is_connected = False
        while self.questions:
            self.answer(0, in_time=False)

    def close_channel(self, over: bytes | None = None) -> None:
        """Close the channel over a message for this exchange, or for another reason."""
        self.sender.attach(None)
        rows, self.wire.open = self.wire.open, []
        self.lost |= {row.id for row in rows}
        self.again |= {row.id for row in rows}
        named = [row for row in rows if over is not None and self.router.address(row).exchange == over]
        self.barred += len(named)
        for outcome, some in ((Outcome.BARRED, named), (Outcome.UNKNOWN, [row for row in rows if row not in named])):
            if some:
                self.sender.settle(Settled(some, outcome, MISSING.format((over or b"").decode())))
        self.note_refused()

    def note_refused(self) -> None:
        self.refused |= {fault.row.id for fault in self.sender.faulty}

    def take(self) -> None:
        """Take the first message that is under way."""
        if not self.wire.open:
            return
        row = self.wire.open[0]
        exchange = self.router.address(row).exchange
        if exchange in self.missing:
            self.close_channel(exchange)
            self.open_channel()
            return
        self.wire.open.pop(0)
        if row not in self.left:
            self.left.append(row)
        self.sender.settle(Settled((row,), Outcome.CONFIRMED))

    def refuse(self) -> None:
        """Refuse the first message that is under way: its queue is full."""
        if self.wire.open:
            row = self.wire.open.pop(0)
            self.again.add(row.id)
            self.refused.add(row.id)
            self.sender.settle(Settled((row,), Outcome.NACKED))

    def write(self) -> None:
        """Do what the marker does."""
        confirmed, faulty = self.sender.take_settled()
        self.marked |= {row.id for row in confirmed}
        queue = self.sender.queue
        for fault in faulty:
            exchange = self.router.address(fault.row).exchange
            assert exchange not in (b"e4", b"e9")  # those work all the time
            withdrawn = queue.withdraw(partial(self.is_for, exchange))
            heads = [fault.row, *withdrawn.heads]
            self.aside += heads + withdrawn.waiting
            for row in heads:
                if self.policy.put_away_holds_key:
                    self.aside += queue.remove_followers(row)
                else:
                    queue.release_key(row)
        self.sender.pump()

    async def do(self, step: str, which: int) -> None:
        match step:
            case "offer":
                self.offer(3)
            case "answer" | "answer_late":
                self.answer(which, in_time=step == "answer")
            case "fence":
                self.may_send = not self.may_send
                self.sender.pump()
            case "mend":
                self.missing ^= {b"e0", b"e2"}
            case "delete":
                self.missing.add(b"e3")
            case "abandon":
                await self.abandon()
            case "sleep":
                await asyncio.sleep(0)  # a wait after a refusal is over
            case _:
                {
                    "take": self.take,
                    "refuse": self.refuse,
                    "write": self.write,
                    "close": self.close_channel,
                    "lose": self.lose_connection,
                    "connect": self.connect,
                    "leave": self.leave,
                }[step]()

    def offer(self, number: int) -> None:
        self.sender.offer(self.rows[self.offered : self.offered + number])
        self.offered = min(self.offered + number, len(self.rows))

    async def abandon(self) -> None:
        """Lose the session, and read again what was offered and is pending."""
        abandoning = asyncio.create_task(self.sender.abandon())
        await asyncio.sleep(0)
        while self.wire.open:
            self.take()
        await abandoning
        done = self.marked | {row.id for row in self.aside}
        self.sender.offer([row for row in self.rows[: self.offered] if row.id not in done])

    def leave(self, lane: int = 1) -> None:
        """Release a lane and take it again: but for what is in flight or settled, every row is given back."""
        sender = self.sender
        given_back = sender.give_back({lane})
        elsewhere = [*self.wire.open, *self.aside, *sender.confirmed, *(fault.row for fault in sender.faulty)]
        away = self.marked | {row.id for row in elsewhere}
        expected = [row for row in self.rows[: self.offered] if row.lane == lane and row.id not in away]
        assert sorted(given_back) == expected
        sender.offer(expected)

    def is_for(self, exchange: bytes, row: Row) -> bool:
        return self.router.address(row).exchange == exchange

    def look(self) -> None:
        """Check what holds at any time."""
        assert self.sender.in_flight == len(self.wire.open) <= self.max_in_flight
        if self.policy.one_at_a_time:
            keys = [row.key for row in self.wire.open if row.key is not None]
            assert len(keys) == len(set(keys)), "two rows of a key are under way"


POLICIES = [DeliveryPolicy.of(ordering, policy) for ordering in Ordering for policy in KeyPolicy]


STEPS = (
    *("refuse", "refuse", "sleep"),
    *("offer", "offer", "take", "take", "answer", "answer", "answer_late", "write", "close", "lose", "connect"),
    *("connect", "abandon", "leave", "fence", "mend", "delete"),
)


@settings(max_examples=400, deadline=None)
@example(  # the fourth row waits for e3 while the sixth, of the same key, has no room
    POLICIES[2],
    1,
    [(0, 0), (0, 4), (0, 4), (1, 3), (0, 4), (1, 4)],
    ["offer", "take", "connect", "answer", "offer", "take", "take", "answer"],
    0,
)
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 2, 3, 4, 9])), min_size=6, max_size=30),
    st.lists(st.sampled_from(STEPS), min_size=20, max_size=60),
    st.integers(0, 100),
)
def test_rows_of_a_key_leave_in_order_and_none_is_lost(
    policy: DeliveryPolicy, max_in_flight: int, kinds: list[tuple[int, int]], steps: list[str], which: int
) -> None:
    rows = rows_of(kinds)

    async def run() -> Broker:
        broker = Broker(policy, max_in_flight, rows)
        broker.connect()
        for step in steps:
            await broker.do(step, which)
            broker.look()
        broker.missing = {b"e0", b"e1"}
        broker.may_send = True
        broker.connect()
        broker.offer(len(rows))
        for _ in range(2000):
            if len(broker.marked) + len(broker.aside) == len(rows):
                break
            broker.answer(0)
            broker.take()
            broker.write()
            broker.look()
            await asyncio.sleep(0)
        return broker

    with patch.object(backpressure, "WAIT", 0.0), patch.object(sender, "NACK_BACKOFF", 0.0):
        broker = asyncio.run(run())

    assert len(broker.sender.queue) == broker.sender.in_flight == 0
    left, aside = [row.id for row in broker.left], [row.id for row in broker.aside]
    assert sorted({*left, *aside}) == [row.id for row in rows], "lost"
    assert len(left) == len(set(left))
    assert len(aside) == len(set(aside))
    of_key: dict[Key, list[int]] = {}
    for row in broker.left:
        if row.key is not None and (policy.one_at_a_time or row.id not in broker.refused):
            of_key.setdefault(row.key, []).append(row.id)
    for ids in of_key.values():
        assert ids == sorted(ids)
    assert set(broker.wire.redelivered) <= broker.lost
    assert broker.sender.failures[Outcome.BARRED] == broker.barred


def rows_of(kinds: Iterable[tuple[int, int]]) -> list[Row]:
    """Make a row of each key (0: none) and exchange (9: that of the settings); each key has its lane."""
    return [
        ROW._replace(
            id=n,
            message_id=b"%036d" % n,
            lane=key,
            aggregate_id=str(key).encode() if key else None,
            exchange=None if exchange == 9 else b"e%d" % exchange,
            routing_key=b"k",
        )
        for n, (key, exchange) in enumerate(kinds, start=1)
    ]
