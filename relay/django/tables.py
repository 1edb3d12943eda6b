"""What a database has of the outbox, for the checks and for `Migrate`."""

from typing import Any, NamedTuple

from relay.outbox.row import NewRow

# From the catalog, which every login may read: the login of a writer may read no table.
READ = """
    SELECT
        obj_description(version.oid, 'pg_class'),
        ARRAY(
            SELECT name FROM unnest(%(columns)s::text[]) AS given (name) WHERE NOT EXISTS (
                SELECT FROM pg_attribute WHERE attrelid = message.oid AND attname = name AND NOT attisdropped)
        ),
        has_schema_privilege(space.oid, 'USAGE') AND coalesce(has_sequence_privilege(ids.oid, 'USAGE'), true)
            AND NOT EXISTS (
                SELECT FROM pg_attribute
                WHERE attrelid = message.oid AND attname = ANY (%(columns)s)
                    AND NOT has_column_privilege(message.oid, attnum, 'INSERT')
            ),
        has_table_privilege(message.oid, 'SELECT') AND coalesce(has_table_privilege(shown.oid, 'SELECT'), true),
        has_table_privilege(version.oid, 'SELECT'),
        current_user::text
    FROM pg_namespace AS space
    JOIN pg_class AS message ON message.relnamespace = space.oid AND message.relname = 'message'
    LEFT JOIN pg_class AS version ON version.relnamespace = space.oid AND version.relname = 'migration'
    LEFT JOIN pg_class AS shown ON shown.relnamespace = space.oid AND shown.relname = 'message_state'
    LEFT JOIN pg_class AS ids ON ids.relnamespace = space.oid AND ids.relname = 'message_id_seq' AND ids.relkind = 'S'
    WHERE space.nspname = %(schema)s
"""


class OutboxFound(NamedTuple):
    """What the catalog says of the tables, and of the rights of the login."""

    note: str | None
    missing: list[str]  # columns
    may_write: bool
    may_read: bool  # messages
    may_read_version: bool | None  # which a login that only writes may not
    login: str


def read_outbox(database: Any, schema: str) -> OutboxFound | None:
    """Return what the database of a connection of Django has; None: no outbox in this schema."""
    with database.cursor() as cursor:
        cursor.execute(READ, {"schema": schema, "columns": list(NewRow._fields)})
        row = cursor.fetchone()
    return None if row is None else OutboxFound(*row)
