"""The mapped class, for applications that add events to a session next to their business objects."""

from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, mapped_column

from relay.alembic import INFO
from relay.outbox import watch
from relay.outbox.alchemy import require_transaction
from relay.outbox.declared import Declared
from relay.outbox.events import Event
from relay.outbox.row import MAX_PAYLOAD_BYTES, row_of
from relay.outbox.trace import current_trace_context


class JsonText(sa.types.TypeDecorator[str]):
    """JSON as unchanged text: SQLAlchemy's JSON type would parse it and write it again."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, stored_as: "sa.JSON[Any]") -> None:
        super().__init__()
        self.stored_as = stored_as

    def bind_expression(self, bindparam: sa.BindParameter[str]) -> sa.ColumnElement[str]:
        return sa.cast(bindparam, self.stored_as)

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
        return sa.cast(column, sa.Text)


class OutboxBase(DeclarativeBase):
    """A separate registry: the table belongs to `relay migrate`, not to the application's metadata."""


class OutboxMessage(OutboxBase):
    """The row of an event; `session.add(OutboxMessage(event))` writes it with the session's flush.

    The constructor checks the event, before the session has it. Set a schema other than `outbox` on the engine:
    `execution_options={"schema_translate_map": {"outbox": "events"}}`.

    `autocommit`: the flush may be outside a transaction, on an engine with AUTOCOMMIT.

    Raises:
        EventError: the outbox would refuse the event.
        NoTransactionError: raised by a flush that is outside a transaction.
    """

    __tablename__ = "message"
    __table_args__ = {"schema": "outbox", "info": {INFO: True}}  # noqa: RUF012

    # SQLAlchemy needs a key that is known before the write: to fetch `id`, a writer would need the right to read.
    message_id: Mapped[UUID] = mapped_column(primary_key=True)
    aggregate_type: Mapped[str]
    aggregate_id: Mapped[str | None]
    event_type: Mapped[str]
    exchange: Mapped[str | None]
    routing_key: Mapped[str | None]
    headers: Mapped[str | None] = mapped_column(JsonText(postgresql.JSONB()))
    content_type: Mapped[str | None]
    payload: Mapped[str | None] = mapped_column(JsonText(postgresql.JSON()))
    payload_bytes: Mapped[bytes | None]
    available_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    trace_context: Mapped[str | None] = mapped_column(JsonText(postgresql.JSONB()))

    _may_autocommit = False

    def __init__(
        self, event: Event | Declared, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES, autocommit: bool = False
    ) -> None:
        row = row_of(event, current_trace_context(), max_payload_bytes)
        super().__init__(**row._asdict())
        watch.note([row])
        self._may_autocommit = autocommit


@sa.event.listens_for(OutboxMessage, "before_insert")
def _check_transaction(_: Mapper[OutboxMessage], connection: sa.Connection, message: OutboxMessage) -> None:
    if watch.is_strict() or not message._may_autocommit:
        require_transaction(connection)
