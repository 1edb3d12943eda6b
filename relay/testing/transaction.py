"""Let no event be written outside of a transaction, whatever the application asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

from relay.outbox import watch


@contextmanager
def require_transaction() -> Iterator[None]:
    """Refuse `autocommit=True` until the end of the block, in every thread.

    `add` outside of a transaction raises NoTransactionError. With `autocommit=True` it does so in such a block alone. A
    test finds an event there that would stay when its change fails.
    """
    with watch.being_strict():
        yield
