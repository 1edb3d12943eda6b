"""`relay config roles --schema`: roles for another schema, which leave those of `outbox` alone."""

import re
from collections.abc import Iterator

import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.packaged import roles
from relay.operate.schema.migrate import migrate
from tests.migrations.conftest import Connection

INSERT = "INSERT INTO events.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"
RIGHTS = """
    SELECT array_agg(relacl::text ORDER BY oid), array_agg(relowner ORDER BY oid)
    FROM pg_class WHERE relnamespace = 'outbox'::regnamespace
"""


@pytest.fixture
def script(connection: Connection, database: DatabaseSettings) -> Iterator[str]:
    migrate(database.model_copy(update={"schema_name": "events"}))
    script = roles("events")
    yield script
    names = set(re.findall(r"'(events_[a-z]+)'", script))
    for name in names:
        connection.execute(f"DROP OWNED BY {name}")
    for name in names:
        connection.execute(f"DROP ROLE {name}")


def test_the_script_for_another_schema_touches_no_other(connection: Connection, script: str) -> None:
    before = connection.execute(RIGHTS).fetchone()

    connection.execute(script.encode())
    connection.execute(script.encode())

    assert "outbox" not in re.sub("--.*", "", script)
    assert connection.execute(RIGHTS).fetchone() == before
    connection.execute("SET ROLE events_writer")
    assert connection.execute(INSERT).rowcount == 1
    connection.execute("RESET ROLE")
