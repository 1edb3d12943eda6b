"""What `relay.testing` may observe and forbid. An application that is not under test pays a look at an empty list."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from relay.outbox.errors import NoTransactionError
from relay.outbox.row import NewRow

Watcher = Callable[[Sequence[NewRow]], None]

watchers: list[Watcher] = []
strict_blocks: list[object] = []  # while there is one, `autocommit=True` is refused, too


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Until the end of the block, the watcher gets the rows of each write before they are sent."""
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


@contextmanager
def being_strict() -> Iterator[None]:
    block = object()
    strict_blocks.append(block)
    try:
        yield
    finally:
        strict_blocks.remove(block)


def is_strict() -> bool:
    return bool(strict_blocks)


def no_transaction() -> NoTransactionError:
    return NoTransactionError(may_autocommit=not is_strict())


def note(rows: Sequence[NewRow]) -> None:
    for watcher in watchers:
        watcher(rows)
