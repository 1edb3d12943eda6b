"""0023: no job has a rate by which it never ends, also of those that are there."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.conftest import Connection

MADE = "INSERT INTO outbox.job (kind, source, made_by, filter, rate) VALUES ('retry', 'parked', 'ada', '{}', %s)"
RATES = [None, 1e-300, 0.01, 500.0, float("inf"), float("nan")]


def test_rates_that_are_there_are_bounded_and_no_other_is_written(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0022")
    for rate in RATES:
        connection.execute(MADE, [rate])

    migrate(database)

    rates = connection.execute("SELECT rate FROM outbox.job ORDER BY id").fetchall()
    assert [rate for (rate,) in rates] == [None, 0.01, 0.01, 500.0, 999999.0, 999999.0]
    for rate in (0.0, 0.001, float("nan"), float("inf"), -1.0):
        with pytest.raises(psycopg.errors.CheckViolation, match="job_rate"):
            connection.execute(MADE, [rate])
