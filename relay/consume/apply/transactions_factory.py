"""Choose the transactions for an inbox and its handlers: psycopg or SQLAlchemy, asynchronous or in a thread."""

import psycopg

from relay.config.settings import DatabaseSettings
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import EVERYTHING, Admission, Inbox
from relay.consume.apply.transactions import AsyncTransactions, ThreadTransactions, Transactions
from relay.errors import ConfigurationError


def open_transactions(
    inbox: Inbox, handlers: Handlers | None = None, *, pipeline: bool = False, admission: Admission = EVERYTHING
) -> Transactions:
    """Return transactions, not yet connected; without handlers they only `execute` our own statements.

    Raises:
        ConfigurationError: inbox, handlers and pipeline do not fit together.
    """
    if not isinstance(inbox.target, DatabaseSettings):
        from relay.consume.apply.sqlalchemy_transactions import open_alchemy  # noqa: PLC0415  # SQLAlchemy: only who uses it pays

        return open_alchemy(inbox, handlers, pipeline=pipeline, admission=admission)
    if handlers is not None:
        handlers.require_place(psycopg.AsyncConnection if handlers.is_async else psycopg.Connection)
    if handlers is None or handlers.is_async:
        return AsyncTransactions(inbox, handlers or Handlers({}, is_async=True), admission, pipeline)
    if pipeline:
        raise ConfigurationError("pipeline needs `async def` handlers")
    return ThreadTransactions(inbox, handlers, admission)
