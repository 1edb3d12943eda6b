"""A row of the outbox as the engine carries it, and what can become of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, StrEnum, auto
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from psycopg import AsyncCursor
from psycopg.adapt import Loader
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

Key = tuple[bytes, bytes, bytes | None]  # type, id, and the role if `key_scope` parts the roles
Place = tuple[int, int]  # lane and id of a row

MAX_TRACEPARENT, MAX_TRACESTATE = 55, 512  # bytes, of W3C Trace Context
ROW_BYTES = 512  # what a row costs in memory, without its payload and headers


class Row(NamedTuple):
    """One pending message, its text as the UTF-8 bytes that PostgreSQL sent; nothing is decoded.

    The fields are the columns of `pending.READ`, in that order.
    """

    lane: int
    id: int
    message_id: bytes  # text form, 36 bytes
    aggregate_type: bytes
    aggregate_id: bytes | None
    event_type: bytes
    exchange: bytes | None
    routing_key: bytes | None
    content_type: bytes | None
    headers: bytes | None  # a JSON object
    traceparent: bytes | None
    tracestate: bytes | None
    payload: bytes | None
    payload_bytes: bytes | None
    created_at: int  # microseconds since 2000-01-01 UTC, as PostgreSQL keeps them
    attempts: int
    backoff_ms: int  # how long it must still wait; 0 when it is due
    excess: bytes | None  # why it was not read completely; no message can be made of it
    cost: int  # bytes, as the server counts them, of a lane's share, or moved when the row is parked
    left_out: bool = False  # it does not fit for now; payload and headers were not read
    key_role: bytes | None = None  # the role that wrote it, if `key_scope` parts the roles
    written_as: bytes = b""  # the role that wrote it; empty where no role is known

    @property
    def key(self) -> Key | None:
        """The ordering key; None if the row asks for no order."""
        return None if self.aggregate_id is None else (self.aggregate_type, self.aggregate_id, self.key_role)

    @property
    def body(self) -> bytes:
        return self.payload if self.payload is not None else self.payload_bytes or b""

    @property
    def size(self) -> int:
        """Bytes that the row holds in memory, roughly."""
        return len(self.payload or self.payload_bytes or b"") + len(self.headers or b"") + ROW_BYTES


# The same key without a Python frame for each row, for loops over many rows. Without an id it is (type, None, role).
key_of: Callable[[Row], Any] = itemgetter(*map(Row._fields.index, ("aggregate_type", "aggregate_id", "key_role")))


class Address(NamedTuple):
    """An exchange and a routing key, as AMQP short strings (at most 255 bytes each)."""

    exchange: bytes
    routing_key: bytes


async def fetch_rows(cursor: AsyncCursor[Any]) -> list[Any]:
    """Return all rows of the last statement.

    libpq's copy of them is freed at once. Otherwise the cursor keeps it until the next statement, and each byte of a
    window is in memory twice.
    """
    rows = await cursor.fetchall()
    if cursor.pgresult is not None:
        cursor.pgresult.clear()
    return rows


def give_rows(cursor: AsyncCursor[Any]) -> None:
    """Make a binary cursor return `Row`s whose text is not decoded."""
    cursor.row_factory = lambda _: partial(tuple.__new__, Row)
    give_bytes(cursor)


def give_bytes(cursor: AsyncCursor[Any]) -> None:
    """Make a binary cursor return text as the bytes that PostgreSQL sent."""
    raw: dict[str, type[Loader]] = {
        "text": ByteaBinaryLoader,
        "json": ByteaBinaryLoader,
        "timestamptz": Int8BinaryLoader,
    }
    for name, loader in raw.items():
        cursor.adapters.register_loader(name, loader)


class Outcome(StrEnum):
    """What became of one publish, as far as the relay can know."""

    CONFIRMED = "confirmed"  # the broker has taken it over
    NACKED = "nacked"  # the broker could not take it over; nothing is wrong with the row
    RETURNED = "returned"  # no queue is bound for its routing key
    BARRED = "barred"  # its address takes nothing: the exchange is missing or forbidden, or the queue full or dead
    REFUSED = "refused"  # it alone closed the channel
    REJECTED = "rejected"  # the same by 406: the broker never takes such a message, for example a too large one
    UNSENDABLE = "unsendable"  # the relay cannot make a message of it, and never will
    SUSPECT = "suspect"  # the broker closed the channel because of one of several rows
    UNKNOWN = "unknown"  # time-out or lost connection: it may have arrived


class Settled(NamedTuple):
    """Rows with one outcome, in the order in which they were sent, and the broker's reason."""

    rows: Sequence[Row]
    outcome: Outcome
    reason: str = ""


class Blame(Enum):
    """What is wrong when a row is refused."""

    ADDRESS = auto()  # the row itself may be fine
    ROW = auto()  # it may go out at another attempt
    ROW_FOR_GOOD = auto()  # no further attempt can help
    NOBODY = auto()  # no queue is bound for it, and its route says to discard it


class Fault(NamedTuple):
    """A row that the broker or the relay refuses."""

    row: Row
    reason: str
    blame: Blame


Given = TypeVar("Given", Row, Fault)

# Bounds of one statement that moves rows. When 20,000 faulty rows moved one by one, the rows of other writers waited
# for half a minute. But a row may have a gigabyte that was never read, and moving that takes time.
ROWS_PER_MOVE, BYTES_PER_MOVE = 500, 16 * 1024 * 1024


def pieces(given: Sequence[Given], costs: Iterable[int]) -> Iterator[Sequence[Given]]:
    """Split rows, each with its cost in bytes, into pieces that one statement can move to another partition."""
    start = size = 0
    for end, cost in enumerate(costs):
        if end > start and (end - start == ROWS_PER_MOVE or size + cost > BYTES_PER_MOVE):
            yield given[start:end]
            start, size = end, 0
        size += cost
    if given:
        yield given[start:]
