"""Whatever a writer with INSERT alone puts into a row: the neighbours' rows go out, and no connection is lost."""

import asyncio
import json
from typing import Any

import hypothesis.strategies as st
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as bounds
from psycopg.sql import SQL, Identifier

from relay.config.settings import CloudEvents, Route, Settings
from relay.engine.node import Node
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.roles import SCRIPT

EXAMPLES = 25
ROWS = 4  # of each example, with one row of a neighbour before and one behind them
NEIGHBOUR = "neighbour"
PLAIN = {"aggregate_type": "customer", "event_type": "InvoiceIssued"}

characters = st.sampled_from(["a", "é", "\n", "\x01", "'", "*", "#", "\\", "{event_type}", "😀", " "])
names = st.builds(
    lambda character, size: (character * 256).encode()[:size].decode(errors="ignore"),
    characters,
    st.sampled_from([0, 1, 127, 128, 254, 255, 256]),
)
# By (begin, repeated, times): what Hypothesis prints of a failure stays short.
numbers = st.sampled_from([
    ("0", "", 0), ("-1.5", "", 0), ("1e400", "", 0), ("1e38", "", 0), ("3.5e38", "", 0), ("1e39", "", 0),
    ("1e131000", "", 0), ("1e-16000", "", 0), (str(2**63), "", 0), (str(-(2**63) - 1), "", 0), (str(2**64), "", 0),
    ("0.", "3", 16383), ("1.", "0", 16383), ("9", "9", 100_000),
]).map(lambda parts: parts[0] + parts[1] * parts[2])  # fmt: skip
sizes = st.sampled_from([1, 255, 32_000, 65_536, 130_000, 130_800, 131_000, 131_072, 262_144, 3_000_000])
depths = st.sampled_from([1, 63, 64, 65, 66, 300, 1_000, 3_000, 6_000, 10_000])
values = st.one_of(
    st.sampled_from(["null", "true", '""', "[]", "{}", '"\\u0001"', '"\\u0000"', '"\\ud800"', '"\\r\\n"']),
    numbers,
    st.builds(lambda number, times: f"[{', '.join([number] * times)}]", numbers, st.sampled_from([1, 100, 5_000])),
    sizes.map(lambda size: json.dumps("x" * size)),
    depths.map(lambda depth: "[" * depth + "]" * depth),
    depths.map(lambda depth: '{"d":' * depth + "1" + "}" * depth),
    st.sampled_from([1_000, 10_000]).map(lambda keys: json.dumps({str(key): key for key in range(keys)})),
)
header_names = st.one_of(
    st.sampled_from([0, 1, 127, 128, 129, 255, 256, 10_000]).map(lambda size: "x" * size),
    st.sampled_from([
        "CC", "BCC", "x-cc", "x-delay", "x-death", "x-match", "x-delivery-count", "x-first-death-queue", "expiration",
        "user_id", "x-outbox-id", "x-outbox-lane", "x-aggregate-id", "x-outbox-redelivered", "traceparent",
        "x-stream-filter-value", "x-received-from",
    ]),
)  # fmt: skip
tables = st.lists(st.tuples(header_names.map(json.dumps), values), min_size=1, max_size=3).map(
    lambda entries: "{" + ", ".join(f"{name}: {value}" for name, value in entries) + "}"
)
moments = st.sampled_from(["infinity", "-infinity", "4713-01-01 BC", "0099-01-01", "294276-12-31", "now"])
rows: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"aggregate_type": names, "event_type": names},
    optional={
        "aggregate_id": names,
        "exchange": st.one_of(names, st.sampled_from(["outbox", "amq.rabbitmq.trace", "amq.match"])),
        "routing_key": names,
        "content_type": names,
        "headers": tables,
        "trace_context": st.one_of(
            tables, values, values.map(lambda value: f'{{"traceparent": {value}, "tracestate": {value}}}')
        ),
        "payload": st.one_of(values, sizes.map(lambda size: json.dumps("x" * size))),
        "payload_bytes": st.sampled_from([b"", b"\0\xff"]),
        "available_at": moments,
        "message_id": st.just("00000000-0000-0000-0000-000000000000"),
        "writer": sizes.map(lambda size: "w" * size),
        "batch_id": st.sampled_from([0, 2**63 - 1, -(2**63)]),
    },
)


class MixedWriters:
    """Writers and an onlooker of one relay."""

    def __init__(self, outbox: Outbox, writer: psycopg.AsyncConnection, node: Node) -> None:
        self.outbox = outbox
        self.writer = writer
        self.node = node

    async def try_rows(self, hostile: list[dict[str, Any]]) -> None:
        neighbours = [await self.outbox.insert(NEIGHBOUR)]
        last = neighbours[0]
        async with self.writer.transaction():
            for row in hostile:
                await self._insert({"payload": "1", **row} if "payload_bytes" not in row else row)
        neighbours.append(await self.outbox.insert(NEIGHBOUR))

        async def are_sent() -> bool:
            return set(neighbours) <= set(await self.outbox.ids("sent"))

        await eventually(are_sent, "the neighbours' rows are sent")
        await eventually(lambda: self._are_settled(last), "the others are sent or put away")
        snapshot = self.node.snapshot()
        assert (snapshot.broker_losses, snapshot.database_losses) == ({}, {})
        unexplained = await self.outbox.connection.execute(
            "SELECT id FROM outbox.message WHERE state IN ('parked', 'quarantined') AND last_error IS NULL"
        )
        assert await unexplained.fetchall() == []

    async def _insert(self, row: dict[str, Any]) -> None:
        """What the table itself refuses is its writer's affair."""
        statement = SQL("INSERT INTO outbox.message ({}) VALUES ({})").format(
            SQL(", ").join(map(Identifier, row)), SQL(", ").join(SQL("%s") for _ in row)
        )
        try:
            async with self.writer.transaction():
                await self.writer.execute(statement, list(row.values()))
        except (psycopg.DataError, psycopg.IntegrityError, psycopg.OperationalError):
            assert not self.writer.closed

    async def _are_settled(self, after: int) -> bool:
        waiting = (
            "SELECT FROM outbox.message WHERE state = 'pending' AND id > %s AND coalesce(available_at <= now(), true)"
        )
        return (await self.outbox.connection.execute(waiting, [after])).rowcount == 0


# The node draws from `random` in the loop meanwhile: it backs off.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("form", list(CloudEvents))
async def test_no_row_of_a_writer_stops_the_others(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings, database_url: str
) -> None:
    routed = settings.model_copy(update={"routes": (Route(exchange="outbox", cloudevents=form),)})
    await outbox.connection.execute(SCRIPT.encode())
    loop = asyncio.get_running_loop()
    as_writer = f"{database_url}?options=-crole%3Doutbox_writer"
    async with (
        await psycopg.AsyncConnection.connect(as_writer) as writer,
        run_node(routed, max_message_bytes=1_000_000) as node,
    ):
        writers = MixedWriters(outbox, writer, node)

        @example([{**PLAIN, "headers": '{"large": "' + "x" * 200_000 + '"}'}])
        @example([{**PLAIN, "headers": f'{{"zeros": [{", ".join(["1e131000"] * 9_000)}]}}'}])
        @example([{**PLAIN, "exchange": "é" * 127}])
        @bounds(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(rows, min_size=1, max_size=ROWS))
        def each(hostile: list[dict[str, Any]]) -> None:
            asyncio.run_coroutine_threadsafe(writers.try_rows(hostile), loop).result()

        await asyncio.to_thread(each)
