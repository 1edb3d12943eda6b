"""0024: what one role writes ends no other role's work, also by rows that are there."""

from typing import Any

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.conftest import Connection

WRITTEN = """
    INSERT INTO outbox.quarantine (exchange, routing_key, reason, probes, since, probed_at)
        VALUES ('', 'odd', '', 2147483647, '-infinity', 'infinity'), ('', 'plain', '', 3, '2026-01-01Z', NULL);
    INSERT INTO outbox.node (name, backend_pid, lanes, version, heartbeat_at, reasons)
        VALUES ('odd', 1, '{1}', '0.1.0', 'infinity', '{}'), ('odd lanes', 1, '{{1},{2}}', '0.1.0', now(), '{}'),
            ('odd reasons', 1, '{}', '0.1.0', now(), '{NULL}'), ('plain', 1, '{1,2}', '0.1.0', now(), '{slow}');
    INSERT INTO outbox.pool VALUES ('odd', 'q', 'NaN'), ('odder', 'q', 0), ('plain', 'q', 0.8);
    INSERT INTO outbox.pool_member (pool, name, checked_in_at, leaving, unacknowledged)
        VALUES ('plain', 'odd', 'infinity', false, 0), ('plain', 'plain', now(), false, 0);
    INSERT INTO outbox.pool_partition (pool, partition, epoch)
        VALUES ('plain', 99, 1), ('plain', 1, 9223372036854775807), ('plain', 2, 7);
    INSERT INTO outbox.job (kind, source, made_by, filter, stages, stop_when_failing)
        VALUES ('retry', 'parked', 'ada', '{}', '{{1},{2}}', 'NaN'), ('retry', 'parked', 'ada', '{}', '{1,10}', 0.05)
"""
LEFT: dict[str, list[tuple[Any, ...]]] = {
    "SELECT routing_key, probes, since = '1970-01-01Z', probed_at = '9000-01-01Z' FROM outbox.quarantine": [
        ("odd", 999_999, True, True),
        ("plain", 3, False, None),
    ],
    "SELECT name FROM outbox.node": [("plain",)],
    "SELECT name, check_in_timeout FROM outbox.pool": [("odd", 86_400), ("odder", 0.01), ("plain", 0.8)],
    "SELECT name FROM outbox.pool_member": [("plain",)],
    "SELECT partition, epoch FROM outbox.pool_partition": [(1, 2**62 - 1), (2, 7)],
    "SELECT stages, stop_when_failing FROM outbox.job": [(None, 1), ([1, 10], 0.05)],
}
REFUSED = {
    "UPDATE outbox.quarantine SET probes = 2147483647": "quarantine_probes",
    "UPDATE outbox.quarantine SET since = '-infinity'": "quarantine_since",
    "UPDATE outbox.node SET heartbeat_at = 'infinity'": "node_heartbeat_at",
    "UPDATE outbox.node SET lanes = '{1,NULL}'": "node_lanes",
    "UPDATE outbox.node SET published_total = 9223372036854775807": "node_published_total",
    "UPDATE outbox.pool SET check_in_timeout = 1e-9": "pool_check_in_timeout",
    "UPDATE outbox.pool_member SET checked_in_at = 'infinity'": "pool_member_checked_in_at",
    "UPDATE outbox.pool_partition SET epoch = 9223372036854775807": "pool_partition_epoch",
    "UPDATE outbox.job SET stages = '{1,NULL}'": "job_stages_list",
    "UPDATE outbox.job SET stop_when_failing = 'NaN'": "job_stop_when_failing",
}


def test_values_that_are_there_are_bounded_and_no_other_is_written(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0023")
    connection.execute(WRITTEN)

    migrate(database)

    for read, rows in LEFT.items():
        assert sorted(connection.execute(read.encode()).fetchall(), key=str) == sorted(rows, key=str)
    for change, constraint in REFUSED.items():
        with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
            connection.execute(change.encode())
