"""Read messages for the admin as `relay console` does: each page at a bounded cost, however many rows there are."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections, transaction
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier

from relay.django import where
from relay.django.models import OutboxRow
from relay.operate.messages.look import FoundLine, Place
from relay.operate.messages.message import rows_at
from relay.servers.postgres.tables import Tables

LINE = (
    "id",
    "message_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "state",
    "created_at",
    "sent_at",
    "attempts",
)
READ = SQL("SELECT {columns} FROM {rows} LIMIT 1")


@contextmanager
def tables() -> Iterator[Tables]:
    """Yield the outbox on Django's connection, in a transaction. Errors of the database are those of `django.db`."""
    database = connections[where.alias()]
    with transaction.atomic(using=database.alias), database.wrap_database_errors:
        yield Tables(database.connection, where.schema())


def as_model(line: FoundLine) -> OutboxRow:
    """Return a line of a list as an instance, which knows its `place` if it was sent."""
    message = OutboxRow(last_error=line.last_error, **{name: getattr(line, name) for name in LINE})
    message.place = line.place
    return message


def read(row: int, place: Place | None) -> OutboxRow | None:
    """Return the row of this id, which was sent to this place or was not sent; None when it is not there."""
    columns = SQL(", ").join(Identifier(field.name) for field in OutboxRow._meta.fields)
    with tables() as outbox:
        read = outbox.sql(READ, columns=columns, rows=rows_at(outbox, row, place))
        with outbox.connection.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(read).fetchone()
    return None if found is None else OutboxRow(**found)
