"""The repair of an archive that is behind archives the days."""

import psycopg
import pytest

from tests.runbooks.repair import Operator
from tests.spark.running import job_environment
from tests.spark.sent import add_sent

UNARCHIVED = "SELECT count(*) FROM outbox.archived_day"


@pytest.mark.jobs
@pytest.mark.timeout(300)
async def test_days_that_are_not_archived_are_archived(operator: Operator, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        add_sent(connection, "2026-11-01", 30)
        add_sent(connection, "2026-11-02", 20)
    with_spark = Operator(
        operator.folder,
        {**job_environment(), **operator.variables, "ARCHIVE": str(operator.folder / "archive")},
    )

    await with_spark.repair("OutboxArchiveBehind")

    with psycopg.connect(database_url) as connection:
        assert connection.execute(UNARCHIVED).fetchone() == (2,)
