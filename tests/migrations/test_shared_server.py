"""0033: a publication of all tables keeps no row from being changed or deleted, in whichever table of ours."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.support.publication import publish_all

# Each table but the days of sent rows, whose rows come and go with the day; with whether a generated column is in it.
IDENTITIES = """
    SELECT relname, CASE relreplident
        WHEN 'f' THEN EXISTS (SELECT FROM pg_attribute WHERE attrelid = pg_class.oid AND attgenerated <> '')
        ELSE (
            SELECT CASE WHEN bool_and(attnotnull) THEN bool_or(attgenerated <> '') END
            FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)
            WHERE indrelid = pg_class.oid
                AND CASE relreplident WHEN 'd' THEN indisprimary WHEN 'i' THEN indisreplident END
        )
    END
    FROM pg_class
    WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND relname !~ '^message_sent_[0-9]{8}$'
    ORDER BY relname
"""
MAKE_DAY = "SELECT outbox.ensure_inbox_days((now() AT TIME ZONE 'UTC')::date + 7, 1)"
FILL = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state)
    SELECT 'a', 'e', '1', state FROM unnest('{pending,parked,quarantined,discarded,archived}'::text[]) AS state
"""
CHANGE = """
    UPDATE outbox.message SET attempts = attempts + 1 WHERE state = '{state}';
    DELETE FROM outbox.message WHERE state = '{state}'
"""


@pytest.mark.every_postgres
def test_each_table_has_an_identity(connection: Connection) -> None:
    """Only that of pending rows has a generated column."""
    connection.execute(MAKE_DAY)

    found = {str(name): is_generated for name, is_generated in connection.execute(IDENTITIES).fetchall()}

    assert [name for name, is_generated in found.items() if is_generated is None] == []
    assert [name for name, is_generated in found.items() if is_generated] == ["message_pending"]
    assert sum(name.startswith("processed_message_") for name in found) == 5  # undated, three days, and the one above


@pytest.mark.every_postgres
@pytest.mark.parametrize("state", ["pending", "parked", "quarantined", "discarded", "archived"])
@pytest.mark.parametrize("by", ["partition", "root"])
def test_a_publication_of_all_tables_keeps_no_row_from_being_changed(
    connection: Connection, state: str, by: str
) -> None:
    """The answer of 0032 was an error."""
    connection.execute(FILL)
    connection.execute(publish_all(connection.info.server_version, by_root=by == "root"))

    connection.execute(CHANGE.format(state=state).encode())

    left = connection.execute("SELECT count(*) FROM outbox.message WHERE state = %s", [state]).fetchone()
    assert left == (0,)


def test_the_way_back_and_forth_ends_where_it_began(database: DatabaseSettings, connection: Connection) -> None:
    before = description(url_of(database))

    downgrade(database, "0032")
    connection.execute(FILL)
    connection.execute(publish_all(connection.info.server_version))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        connection.execute(CHANGE.format(state="pending").encode())
    migrate(database)

    assert description(url_of(database)) == before
