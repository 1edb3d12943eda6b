"""A file as the buffer, for hosts without PostgreSQL: SQLite, with each commit on the disk before it is reported.

All calls of SQLite run in one separate thread, one after the other.
"""

import asyncio
import ctypes
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

from relay.engine import row as engine
from relay.errors import BufferFileError, BusyError, NotAcceptedError
from relay.logger import get_logger
from relay.outbox.row import NewRow
from relay.publisher.buffer import BufferedRows
from relay.publisher.entry import Unaccepted, engine_row

log = get_logger(__name__)

APPLICATION_ID = 0x6F626678  # "obfx"
VERSION = 1
PRIVATE = 0o600  # only the publisher's user may read the events
BESIDE = ("-wal", "-shm", "-journal")  # files that SQLite makes
BEHIND = 2**62  # `due` of a row that waits behind another one of its key

# Bytes of the volume that events never take, because deleting a row needs room, too. SQLite's log grows to 4 MB before
# it goes into the file. 500 deleted rows add at most 3 MB to it (measured: random keys and order, 1 B to 20 kB a row).
# To change a row, SQLite writes all of it into the log and then into the file. So the room of the largest row is kept
# twice.
RESERVE = 8 * 1024 * 1024
FORGOTTEN_AT_ONCE = 500  # rows
CHANGED_AT_ONCE, CHANGED_BYTES = 200, 1024 * 1024  # rows of a key, and the bytes that they carry

TABLE = f"""
    BEGIN;
    CREATE TABLE message (
        position INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a key
        {", ".join(NewRow._fields)},
        accepted_at INTEGER NOT NULL,               -- microseconds since 2000-01-01 UTC
        due INTEGER NOT NULL DEFAULT 0,             -- 0: it may go; else when it is tried again, monotonic ms
        attempts INTEGER NOT NULL DEFAULT 0,
        reason TEXT                                 -- why the broker refused it
    );
    CREATE INDEX message_due ON message (due, position);
    CREATE INDEX message_key ON message (aggregate_type, aggregate_id, due);
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {VERSION};
    COMMIT;
"""

# A row waits behind a refused row of its key.
WRITE = f"""
    INSERT INTO message ({", ".join(NewRow._fields)}, accepted_at, due)
    VALUES ({", ".join(f":{name}" for name in NewRow._fields)}, :accepted_at, CASE WHEN EXISTS (
        SELECT 1 FROM message WHERE aggregate_type = :aggregate_type AND aggregate_id = :aggregate_id AND due > 0
    ) THEN {BEHIND} ELSE 0 END)
"""

SIZE = " + ".join(f"coalesce(length(CAST({name} AS BLOB)), 0)" for name in ("payload", "payload_bytes", "headers"))
COLUMNS = f"position, attempts, accepted_at, {', '.join(NewRow._fields)}"
# The monotonic clock does not continue from one process to the next, so refused rows are tried at once.
RESUME = f"UPDATE message SET due = 1 WHERE due BETWEEN 2 AND {BEHIND - 1}"

READ = f"SELECT {COLUMNS} FROM message WHERE due = 0 AND position > ? ORDER BY position"
READ_DUE = f"SELECT {COLUMNS} FROM message WHERE due BETWEEN 1 AND ? ORDER BY due"
READ_HELD = f"SELECT {COLUMNS}, reason FROM message WHERE due BETWEEN 1 AND {BEHIND - 1}"

FORGET = "DELETE FROM message WHERE position = ?"

# A refused row waits, and so do all rows of its key, wherever they are sent. A key may be as large as the volume: its
# rows follow their head in pieces (`_move`), each within RESERVE.
HOLD = "UPDATE message SET due = :due, attempts = :attempts, reason = :reason WHERE position = :position"
MOVE = "UPDATE message SET due = ? WHERE position = ?"
OF_KEY = f"""
    SELECT position, {SIZE} FROM message
    WHERE aggregate_type = ? AND aggregate_id = ? AND due = ? ORDER BY position
"""
# A process that was killed between two pieces may leave keys with a head, and keys without one whose rows still wait.
HEADS = (
    f"SELECT aggregate_type, aggregate_id FROM message WHERE due BETWEEN 1 AND {BEHIND - 1} AND aggregate_id NOTNULL"
)
HEADLESS = f"""
    SELECT DISTINCT aggregate_type, aggregate_id FROM message AS row
    WHERE due = {BEHIND} AND NOT EXISTS (
        SELECT 1 FROM message AS head
        WHERE head.aggregate_type = row.aggregate_type AND head.aggregate_id = row.aggregate_id
            AND head.due BETWEEN 1 AND {BEHIND - 1}
    )
"""
LARGEST = f"SELECT coalesce(max({SIZE}), 0) FROM message"

LEFT = "SELECT count(*) FILTER (WHERE due = 0), count(*) FILTER (WHERE due > 0) FROM message"

OPEN: set[sqlite3.Connection] = set()


def _never_close() -> None:
    """Keep a fork from closing the parent's files at its exit: SQLite would delete the log that the parent writes."""
    for database in OPEN:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))


os.register_at_fork(after_in_child=_never_close)

Answer = TypeVar("Answer")
Key = tuple[str, str]  # aggregate type and id


class Stored(NamedTuple):
    """A row of the file."""

    position: int
    attempts: int  # attempts that the broker refused
    row: engine.Row
    reason: str = ""


class File:
    """The file. From `open` to `close`, only this process can use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer")
        self._database: sqlite3.Connection | None = None
        self._largest = 0  # bytes of the largest row

    async def open(self) -> None:
        """Open the file, or make it if it is new.

        Raises:
            BusyError: another process has it open.
            BufferFileError: it cannot be opened, is damaged, or is no buffer.
        """
        await self._do(self._open)

    async def close(self) -> None:
        # The thread comes to it after all that it was given, also when the caller is cancelled meanwhile.
        closing = self._thread.submit(self._close)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    async def write(self, entries: Sequence[Unaccepted]) -> None:
        """Commit these entries, in this order.

        Raises:
            NotAcceptedError: they would take the room that sending needs.
            sqlite3.Error, OSError: they could not be written.
        """
        values = [
            {
                **entry.written._asdict(),
                "message_id": str(entry.written.message_id),
                "accepted_at": entry.row.created_at,
            }
            for entry in entries
        ]
        sizes = [entry.row.size for entry in entries]
        largest = max(self._largest, *sizes)
        await self._do(lambda: self._require_room(sum(sizes), largest))
        self._largest = largest
        await self._change((WRITE, values))

    async def read(self, after: int, most: int, most_bytes: int) -> list[Stored]:
        """Return the rows after a position that may go: at most `most`, and until `most_bytes` is reached."""
        return await self._do(lambda: self._rows(READ, (after,), most, most_bytes))

    async def read_due(self, most: int, most_bytes: int) -> list[Stored]:
        """Return the refused rows that must be tried again."""
        return await self._do(lambda: self._rows(READ_DUE, (_milliseconds(),), most, most_bytes))

    async def held(self) -> list[Stored]:
        """Return all refused rows."""
        return await self._do(lambda: self._rows(READ_HELD, (), BEHIND, BEHIND))

    async def hold(self, stored: Stored, seconds: float, reason: str) -> None:
        """Let a refused row wait for `seconds`, and the rows of its key behind it."""
        values = {
            "position": stored.position,
            "due": _milliseconds() + round(seconds * 1000),
            "attempts": stored.attempts + 1,
            "reason": reason,
        }
        await self._change((HOLD, [values]))
        if (key := _key(stored)) is not None:
            await self._do(lambda: _move(self._connected(), key, 0, BEHIND))

    async def forget(self, sent: Sequence[Stored]) -> None:
        """Delete confirmed rows, and let the rows go that waited behind one that was refused before."""
        for first in range(0, len(sent), FORGOTTEN_AT_ONCE):
            await self._change((FORGET, [(each.position,) for each in sent[first : first + FORGOTTEN_AT_ONCE]]))
        for key in filter(None, (_key(each) for each in sent if each.attempts)):
            await self._do(partial(_move, self._connected(), key, BEHIND, 0))

    async def left(self) -> BufferedRows:
        """Count the rows."""
        return BufferedRows(*await self._do(lambda: self._connected().execute(LEFT).fetchone()))

    def _open(self) -> None:
        self._database = _opened(self.path)
        OPEN.add(self._database)
        (self._largest,) = self._database.execute(LARGEST).fetchone()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            OPEN.discard(self._database)

    def _require_room(self, size: int, largest: int) -> None:
        volume = os.statvfs(self.path.parent)
        free = volume.f_bavail * volume.f_frsize
        kept = RESERVE + 2 * largest
        needed = kept + 2 * size  # written to the log, and then to the file
        if free < needed:
            raise NotAcceptedError(
                f"{self.path} could not be written: its volume has {free:,} bytes free and {needed:,} are needed."
                f" Of these {kept:,} are reserved to send its events. Free room on the volume, or repair the broker"
            )

    async def _change(self, *changes: tuple[str, Sequence[object]]) -> None:
        def change() -> None:
            with self._connected() as transaction:
                for statement, values in changes:
                    transaction.executemany(statement, values)  # type: ignore[arg-type]

        await self._do(change)

    async def _do(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connected(self) -> sqlite3.Connection:
        assert self._database is not None, "it was opened"  # noqa: S101
        return self._database

    def _rows(self, statement: str, values: tuple[int, ...], most: int, most_bytes: int) -> list[Stored]:
        rows: list[Stored] = []
        size = 0
        for position, attempts, accepted_at, *columns in self._connected().execute(statement, values):
            if len(rows) == most or size >= most_bytes:
                break
            reason = columns[len(NewRow._fields) :]
            written = NewRow(UUID(columns[0]), *columns[1 : len(NewRow._fields)])
            row = engine_row(written, accepted_at)
            size += row.size
            rows.append(Stored(position, attempts, row, *reason))
        return rows


def _key(stored: Stored) -> Key | None:
    row = stored.row
    return None if row.aggregate_id is None else (row.aggregate_type.decode(), row.aggregate_id.decode())


def _move(database: sqlite3.Connection, key: Key, here: int, there: int) -> None:
    """Change the `due` of a key's rows from `here` to `there`, in order, in pieces for which the reserve has room."""
    while True:
        piece, size = [], 0
        for position, bytes_of_row in database.execute(OF_KEY, (*key, here)):
            piece.append((there, position))
            size += bytes_of_row
            if len(piece) == CHANGED_AT_ONCE or size >= CHANGED_BYTES:
                break
        if not piece:
            return
        with database:
            database.executemany(MOVE, piece)


def _milliseconds() -> int:
    return time.monotonic_ns() // 1_000_000 + 1


def _opened(path: Path) -> sqlite3.Connection:
    _keep_private(path)
    try:
        database = sqlite3.connect(path, timeout=0)
        try:
            _prepare(database, path)
        except BaseException:
            database.close()
            raise
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # the mask removes the bits of extended codes
            raise BusyError(f"{path} is the buffer of another process: give each publisher its own file") from None
        raise BufferFileError(f"{path} cannot be a buffer: {error}") from error
    return database


def _keep_private(path: Path) -> None:
    """Make a new file that only its owner can read, whatever the umask is; log existing files that others can read.

    SQLite makes the files next to it with the mode of the file itself.
    """
    try:
        # Only a new file is opened here: closing a file would drop the locks that SQLite has on it in this process.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    except FileExistsError:
        for each in (path, *(path.with_name(path.name + suffix) for suffix in BESIDE)):
            mode = stat.S_IMODE(each.stat().st_mode) if each.exists() else PRIVATE
            if mode & ~0o700:
                log.warning("buffer.exposed", path=str(each), mode=f"{mode:04o}", remedy=f"chmod 600 {each}")
    except OSError as error:
        raise BufferFileError(f"{path} cannot be a buffer: {error.strerror}") from error


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    (kind,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    is_new = not kind and not tables
    if not is_new and kind != APPLICATION_ID:
        raise BufferFileError(f"{path} is a SQLite database of something else, which stays as it is: name another file")
    if not is_new and version != VERSION:
        raise BufferFileError(f"{path} is of version {version}, and this release knows {VERSION}: run a newer one")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    # With ON, Debian's default, SQLite writes all of a deleted row again, for which RESERVE has no room.
    database.execute("PRAGMA secure_delete = FAST")
    if is_new:
        database.executescript(TABLE)
    database.execute("BEGIN IMMEDIATE").connection.commit()  # from here on, this process holds the lock
    damage = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise BufferFileError(
            f"{path} is damaged: {damage}; move it away, and see with sqlite3's .recover what it held"
        )
    with database:
        database.execute(RESUME)
    for statement, here, there in ((HEADS, 0, BEHIND), (HEADLESS, BEHIND, 0)):
        for key in database.execute(statement).fetchall():
            _move(database, key, here, there)
