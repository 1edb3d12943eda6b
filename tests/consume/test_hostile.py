"""Whatever an AMQP client puts into its frames: each good message takes effect once, in order, between the bad ones.

A bad one that the broker takes is applied, or a dead letter with its frame where that cannot be decoded. No connection
is lost over it, and no copy of it is refused.
"""

import asyncio
import base64
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers_from
from typing import Any
from uuid import UUID, uuid4

import hypothesis.strategies as st
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as bounds
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, on
from relay.consume.pool import PartitionedConsumer, PoolPolicy
from relay.consume.pool.candidate import Candidate
from relay.operate.letters.letter import Held, LetterSelection
from relay.operate.letters.read import read_letters
from relay.servers.rabbitmq.content_header import RAW_HEADER, UNDECODABLE, decode_header
from tests.consume.effects import QUEUE, Queue, Table, count, running
from tests.consume.policies import ORDERS, QUICK, TWICE
from tests.consume.pool.conftest import master, partitions
from tests.consume.pool.partitions import Partitions
from tests.support.eventually import eventually
from tests.support.raw_client import OCTETS, SHORT_TEXTS, RawClient, entry, long, nested, properties

__all__ = ["master", "partitions"]  # fixtures

# The consumer draws from `random` in the loop meanwhile: it backs off. Hypothesis then prints its strategies.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

EXAMPLES = 15
FIRST_HOSTILE = 1_000_000  # the body of a good message is a smaller number
FIXED = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "l": 8, "L": 8, "f": 4, "d": 8, "T": 8, "D": 5, "V": 0}

texts = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.sampled_from([b"", b"\0", b"Counted", b"a" * 255, b"\xff" * 255, "é".encode() * 127, b"\xed\xa0\x80"]),
)
fixed_values = st.sampled_from([*FIXED]).flatmap(
    lambda letter: st.binary(min_size=FIXED[letter], max_size=FIXED[letter]).map(lambda data: letter.encode() + data)
)
scalars = st.one_of(
    fixed_values,
    st.tuples(st.sampled_from([b"S", b"x"]), st.one_of(texts, st.binary(max_size=300))).map(
        lambda parts: parts[0] + long(parts[1])
    ),
    st.sampled_from([2_000, 100_000, 130_600, 130_900]).map(lambda size: b"S" + long(b"x" * size)),
    st.sampled_from([50, 99, 100, 101, 480, 3_000, 13_000]).map(lambda depth: nested(b"A", depth)),
    st.sampled_from([99, 480, 3_000]).map(lambda depth: nested(b"F", depth)),
    st.sampled_from([1_000, 60_000]).map(lambda items: b"A" + long(b"t\1" * items)),
    st.binary(max_size=6),  # of no type, or cut off
)
names = st.one_of(
    texts,
    st.sampled_from([
        b"x-aggregate-type", b"x-aggregate-id", b"x-event-version", b"x-outbox-lane", b"x-retry-attempts",
        b"x-first-failure", b"x-last-failure", b"x-original-exchange", b"x-original-routing-key", b"x-dead-reason",
        b"x-death", b"x-delivery-count", b"x-partition", b"x-partition-epoch", b"x-folded-header", b"x-undecodable",
        b"x-raw-header", b"traceparent",
    ]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: b"A" + long(b"".join(items))),
        st.lists(st.tuples(names, inner), max_size=3).map(lambda parts: b"F" + long(entries(parts))),
    ),
    max_leaves=4,
)
moments = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**32, 253_402_300_800, 253_402_300_800_000]))
hostile_messages: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"headers": st.lists(st.tuples(names, values), max_size=3)},
    optional={
        **dict.fromkeys(SHORT_TEXTS, texts),
        **dict.fromkeys(OCTETS, st.integers(0, 255)),
        # The broker may drop a message that has expired: as its sender wished.
        "expiration": texts.filter(lambda text: not text.lstrip(b"+").isdigit()),
        "timestamp": moments,
        "routing_key": texts,
    },
)


def entries(parts: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(entry(name[:255], value) for name, value in parts)


def legible(payload: bytes) -> dict[str, Any]:
    """Decode a header without the fault that is found first: RabbitMQ 4 sorts headers, and keeps one of each name.

    A quorum queue writes a true of any other byte than 1 as 1.
    """
    said = decode_header(payload).properties
    headers = {name: value for name, value in (said.headers or {}).items() if name not in (RAW_HEADER, UNDECODABLE)}
    return {**dict(said), "headers": headers}


def handlers() -> list[Any]:
    """Handlers of all types; hostile messages fail once, so that they are held, or copied, too."""
    failed: set[UUID] = set()

    @on("*")
    async def take(message: Message, connection: psycopg.AsyncConnection) -> None:
        if message.json() >= FIRST_HOSTILE and message.message_id not in failed:
            failed.add(message.message_id)
            raise ValueError(message.headers)
        await count(message, connection)

    return [take]


@dataclass
class MixedSenders:
    """Good and bad senders of one queue, and its consumer."""

    client: RawClient
    queue: Queue
    table: Table
    broker: BrokerSettings
    exchange: bytes
    send_good: Callable[[int], Awaitable[object]]
    good: list[int] = field(default_factory=list)
    # Of the bad ones that the broker has taken, by their bodies: as sent, and with the first header of each name alone.
    raw: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    numbers: "numbers_from[int]" = field(default_factory=lambda: numbers_from(FIRST_HOSTILE))

    async def try_messages(self, hostile: Sequence[dict[str, Any]]) -> None:
        await self._send_good()
        for each in hostile:
            await self._send(**each)
            await self._send_good()

        async def is_settled() -> bool:
            applied = await self.table.numbers()
            others = [number for number in applied if number >= FIRST_HOSTILE]
            return len(applied) - len(others) == len(self.good) and (
                len(others) + await self.queue.dead_count() == len(self.raw)
            )

        await eventually(is_settled, "each is applied, or a dead letter")
        assert [number for number in await self.table.numbers() if number < FIRST_HOSTILE] == self.good

    async def settled_once(self) -> None:
        dead: list[Held] = []
        await read_letters(self.broker, f"{QUEUE}.dead", LetterSelection(), dead.append)
        applied = [number for number in await self.table.numbers() if number >= FIRST_HOSTILE]
        assert Counter([*applied, *(int(each.delivered.body) for each in dead)]) == Counter(self.raw.keys())
        for each in dead:
            headers = each.delivered.header.properties.headers or {}
            raws = self.raw[int(each.delivered.body)]
            if RAW_HEADER in headers and "x-dead-reason" in headers and RAW_HEADER.encode() not in raws[0]:
                came = base64.b64decode(str(headers[RAW_HEADER]))
                assert legible(came) in [legible(came[:12] + raw) for raw in raws]

    async def _send_good(self) -> None:
        self.good.append(len(self.good))
        await self.send_good(self.good[-1])

    async def _send(
        self, headers: Sequence[tuple[bytes, bytes]], routing_key: bytes = b"k", **given: bytes | int
    ) -> None:
        number = next(self.numbers)
        lane = [] if any(name == b"x-outbox-lane" for name, _ in headers) else [(b"x-outbox-lane", LANE)]
        told: dict[str, Any] = {"message_id": str(uuid4()).encode(), "message_type": b"Counted", **given}
        parts = [*lane, *headers]
        raw, first = (properties(headers=entries(each), **told) for each in (parts, [*dict(reversed(parts)).items()]))
        if await self.client.publish(raw, b"%d" % number, exchange=self.exchange, routing_key=routing_key):
            self.raw[number] = raw, first


LANE = b"s" + struct.pack(">h", 3)
FULL: dict[str, Any] = {"headers": [(b"fill", b"S" + long(b"x" * 130_900)), (b"\xff", b"V")]}
MANY: dict[str, Any] = {"headers": [(b"many", b"A" + long(b"t\1" * 65_000))], "timestamp": 1}
LOUD: dict[str, Any] = {"headers": [(b"x-aggregate-id", b"S" + long(b"\xff"))], "user_id": b"relay", "expiration": b""}


async def try_all(senders: MixedSenders, consumer: Consumer | PartitionedConsumer) -> None:
    loop = asyncio.get_running_loop()

    @example([FULL, MANY, LOUD])
    @bounds(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(hostile_messages, min_size=1, max_size=5))
    def each(hostile: list[dict[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(senders.try_messages(hostile), loop).result()

    with capture_logs() as events:
        async with running(consumer):
            await asyncio.to_thread(each)
    told = Counter(event["event"] for event in events)
    assert not told.keys() & {"broker.lost", "database.lost", "copy.refused", "pool.removed"}, told
    await senders.settled_once()


@pytest.mark.parametrize("order", ORDERS)
async def test_no_message_of_a_client_stops_the_others(
    order: dict[str, Any], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, client: RawClient
) -> None:
    await queue.declare()
    exchange = await queue.channel.declare_exchange("foreign", "fanout")
    await (await queue.channel.get_queue(queue.name)).bind(exchange)
    senders = MixedSenders(client, queue, table, broker, b"foreign", queue.send)
    await try_all(
        senders,
        Consumer(
            QUEUE,
            handlers(),
            inbox=inbox,
            broker=broker,
            failures=FailurePolicy(retries=TWICE, **order),
            work=WorkPolicy(backoff=QUICK),
        ),
    )


async def test_no_message_of_a_client_stops_a_partition(
    queue: Queue,
    partitions: Partitions,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    client: RawClient,
    master: Candidate,
) -> None:
    senders = MixedSenders(
        client, queue, table, broker, b"billing.partitions", lambda number: partitions.send([number])
    )
    await try_all(
        senders,
        PartitionedConsumer(
            QUEUE,
            handlers(),
            inbox=inbox,
            broker=broker,
            pool=PoolPolicy(check_in_timeout=10),
            failures=FailurePolicy(retries=TWICE),
            work=WorkPolicy(concurrency=1, backoff=QUICK),
        ),
    )
