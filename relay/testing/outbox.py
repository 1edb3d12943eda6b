"""What an application wrote, read in the caller's own transaction."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relay.testing import reading
from relay.testing.matching import Expected, Key, no_such_row, other_count, rows_there, uncommitted
from relay.testing.written import Written

if TYPE_CHECKING:
    from relay.outbox.write import Async, Sync

LOOK_INTERVAL = 0.02  # seconds between two looks at what is waited for


class Outbox:
    """The outbox as the transaction of `target` sees it: with what it wrote and has not committed.

    Args:
        target: as for `add`: a connection of psycopg, a connection or session of SQLAlchemy, or a connection or cursor
            of Django. An `OutboxMessage` that a session has not flushed yet is flushed first.
        schema: where the outbox is.
    """

    def __init__(self, target: "Sync", *, schema: str = "outbox") -> None:
        self._target = target
        self._schema = schema

    def all(self, event_type: str | type | None = None, *, key: Key | None = None) -> list[Written]:
        """Return the rows in the order in which they were written, those that a relay has sent among them.

        Args:
            event_type: a name, or a class that `relay.outbox.event` declares, with the version that it declares.
            key: `(aggregate_type, aggregate_id)`, or `aggregate_id` alone.
        """
        return _matching(self._rows(), Expected(event_type, key))

    def assert_written(
        self, event_type: str | type, *, key: Key | None = None, payload: Any = None, count: int | None = None
    ) -> Written:
        """Return the first row that is so; an assertion prints the nearest rows with their differences.

        Args:
            event_type: as for `all`.
            key: `(aggregate_type, aggregate_id)`, or `aggregate_id` alone.
            payload: what the payload has, maybe among other things. A dict has at least these keys, a list as many
                items. A value may be a matcher, such as `pytest.approx(0.3)`. Or a function that is given the payload,
                and returns whether it is right.
            count: how many rows must be so; without it, at least one.
        Raises:
            AssertionError: there is no such row, or another number of them.
        """
        return _one_of(self._rows(), Expected(event_type, key, payload), count)

    def until_written(
        self,
        event_type: str | type,
        *,
        key: Key | None = None,
        payload: Any = None,
        count: int | None = None,
        within: float = 5.0,
    ) -> Written:
        """Look again until the rows are as `assert_written` wants them, which has the same arguments.

        It is for an application that writes in another thread or process, and commits. Keep no lock that it needs.

        Args:
            within: seconds to wait; after them comes the last look.
        Raises:
            AssertionError: the last look has found no such row, or another number of them.
            RuntimeError: the transaction of the target would not see what is committed meanwhile.
        """
        wanted, end = Expected(event_type, key, payload), time.monotonic() + within
        if snapshot := self._snapshot():
            _require_new_look(snapshot, self._snapshot())
        while True:
            is_last, rows = time.monotonic() >= end, self._rows()
            if is_last or _is_so(rows, wanted, count):
                return _one_of(rows, wanted, count)
            time.sleep(LOOK_INTERVAL)

    def assert_nothing_written(self, event_type: str | type | None = None, *, key: Key | None = None) -> None:
        """Check that no row is there, or no row of this type and key.

        Raises:
            AssertionError: there are some; the message lists them.
        """
        _none_of(self._rows(), Expected(event_type, key))

    def clear(self) -> None:
        """Delete every row, in the transaction of the target."""
        reading.run(self._target, reading.CLEAR, self._schema)

    def require_commit(self) -> None:
        """Check that the transaction of the target has written no pending row, which nobody else would see yet.

        Raises:
            AssertionError: it has.
        """
        _all_committed(reading.run(self._target, reading.UNCOMMITTED, self._schema))

    def _rows(self) -> list[Written]:
        return list(map(reading.decoded, reading.run(self._target, reading.READ, self._schema)))

    def _snapshot(self) -> list[str]:
        return reading.run(self._target, reading.SNAPSHOT, self._schema)


class AsyncOutbox:
    """As `Outbox`, for an asynchronous connection or session of psycopg or SQLAlchemy."""

    def __init__(self, target: "Async", *, schema: str = "outbox") -> None:
        self._target = target
        self._schema = schema

    async def all(self, event_type: str | type | None = None, *, key: Key | None = None) -> list[Written]:
        """As `Outbox.all`."""
        return _matching(await self._rows(), Expected(event_type, key))

    async def assert_written(
        self, event_type: str | type, *, key: Key | None = None, payload: Any = None, count: int | None = None
    ) -> Written:
        """As `Outbox.assert_written`."""
        return _one_of(await self._rows(), Expected(event_type, key, payload), count)

    async def until_written(
        self,
        event_type: str | type,
        *,
        key: Key | None = None,
        payload: Any = None,
        count: int | None = None,
        within: float = 5.0,
    ) -> Written:
        """As `Outbox.until_written`; meanwhile other tasks run, and write by other connections."""
        wanted, end = Expected(event_type, key, payload), time.monotonic() + within
        if snapshot := await self._snapshot():
            _require_new_look(snapshot, await self._snapshot())
        while True:
            is_last, rows = time.monotonic() >= end, await self._rows()
            if is_last or _is_so(rows, wanted, count):
                return _one_of(rows, wanted, count)
            await asyncio.sleep(LOOK_INTERVAL)

    async def assert_nothing_written(self, event_type: str | type | None = None, *, key: Key | None = None) -> None:
        """As `Outbox.assert_nothing_written`."""
        _none_of(await self._rows(), Expected(event_type, key))

    async def clear(self) -> None:
        """As `Outbox.clear`."""
        await reading.run_async(self._target, reading.CLEAR, self._schema)

    async def require_commit(self) -> None:
        """As `Outbox.require_commit`."""
        _all_committed(await reading.run_async(self._target, reading.UNCOMMITTED, self._schema))

    async def _rows(self) -> list[Written]:
        rows = await reading.run_async(self._target, reading.READ, self._schema)
        return list(map(reading.decoded, rows))

    async def _snapshot(self) -> list[str]:
        return await reading.run_async(self._target, reading.SNAPSHOT, self._schema)


def _matching(rows: Sequence[Written], wanted: Expected) -> list[Written]:
    return [row for row in rows if not wanted.differences(row)]


def _is_so(rows: Sequence[Written], wanted: Expected, count: int | None) -> bool:
    """Whether no later row is needed: `_one_of` finds what is wanted, or refuses the count."""
    found = len(_matching(rows, wanted))
    return found > 0 if count is None else found == count or count < 1


def _require_new_look(first: Sequence[str], second: Sequence[str]) -> None:
    """Check that two looks were of two transactions, as without one that goes on."""
    if first == second:
        raise RuntimeError(
            "the transaction of the outbox is repeatable read or serializable, and sees no later commit. Let it be read"
            " committed, or give the outbox a connection in autocommit mode"
        )


def _one_of(rows: Sequence[Written], wanted: Expected, count: int | None) -> Written:
    if count is not None and count < 1:
        raise ValueError(f"count is {count}: what must not be there is for assert_nothing_written")
    found = _matching(rows, wanted)
    if count is not None and len(found) != count:
        raise AssertionError(other_count(wanted, count, rows, found))
    if not found:
        raise AssertionError(no_such_row(wanted, rows))
    return found[0]


def _none_of(rows: Sequence[Written], wanted: Expected) -> None:
    if found := _matching(rows, wanted):
        raise AssertionError(rows_there(wanted, found))


def _all_committed(event_types: Sequence[str]) -> None:
    if event_types:
        raise AssertionError(uncommitted(event_types))
