"""A real Prometheus answers each query of the dashboards, once a relay and a consumer have worked."""

from datetime import UTC, datetime

from tests.consume.effects import Queue, Table
from tests.observe.conftest import Watch
from tests.observe.dashboards import UIDS, expressions
from tests.observe.rules import RULES
from tests.operate.rows import Rows
from tests.support.eventually import eventually


async def test_every_query_of_the_dashboards_returns_series(
    watch: Watch, rows: Rows, queue: Queue, table: Table
) -> None:
    queries = {each.replace("$__rate_interval", "10s") for uid in UIDS for each in expressions(uid)}

    async with watch(rules=RULES.read_text()) as watched:
        for number in range(20):
            rows.pending(str(number))
            await queue.send(number, timestamp=datetime.now(UTC))
        await eventually(lambda: watched.consumer.counters.applied == 20, "all are applied")

        def without_series() -> list[str]:
            return [query for query in queries if not watched.prometheus.query(query)]

        try:
            await eventually(lambda: not without_series(), "each query returns series", within=30)
        finally:
            left = without_series()
    assert left == []
