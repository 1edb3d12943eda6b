"""Look for messages in any state, page by page, at a bounded cost for each page.

What waits comes first, by id. It is read by its indexes. Then comes what was sent, the newest first. Sent rows have no
index. In their day's table they stand in the order of their marks, and a page walks through its blocks from the end. A
page that ends by its bound says how far it has looked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from uuid import UUID

from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.errors import UsageError
from relay.operate.messages.whereabouts import RowId
from relay.operate.sent.selection import blocks_of_day, now
from relay.servers.postgres.tables import Tables

ROWS = 50  # of a page
SCANNED = 5_000  # rows that wait, read for one page; of 16 lanes each, where they are pending
BLOCKS = 2_000  # of sent rows, read for one page: 16 MiB
STEP = 64  # blocks at once
AROUND = 8  # blocks: marks that ran at the same time are not quite in order


class MessageState(StrEnum):
    """Where a row can be."""

    PENDING = "pending"
    PARKED = "parked"
    QUARANTINED = "quarantined"
    ARCHIVED = "archived"
    DISCARDED = "discarded"
    SENT = "sent"


WAITING = tuple(state for state in MessageState if state is not MessageState.SENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which messages; what is `None` selects nothing away.

    Attributes:
        since: of the time of sending, or of writing where the row was not sent.
        until: exclusive.
    """

    state: MessageState | None = None
    row: RowId | None = None  # its id, or its message id
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sent row is: the day's table, and the block and line in it."""

    day: date
    block: int
    line: int

    def __str__(self) -> str:
        return f"{self.day:%Y%m%d}.{self.block}.{self.line}"

    @classmethod
    def of(cls, text: str) -> "Place":
        """Read what `str` wrote.

        Raises:
            UsageError: it is no place.
        """
        parts = text.split(".")
        try:
            if len(parts) != 3 or len(parts[0]) != 8 or not text.replace(".", "").isascii():
                raise ValueError
            day = date(int(parts[0][:4]), int(parts[0][4:6]), int(parts[0][6:]))
            block, line = int(parts[1]), int(parts[2])
            if not (2000 <= day.year < 3000 and 0 <= block < 2**32 - 1 and 0 <= line < 2**16):
                raise ValueError
        except ValueError:
            raise UsageError(f"{text[:80]!r} is no place of a sent row") from None
        return cls(day, block, line)


@dataclass(frozen=True, slots=True)
class FoundLine:
    """A message in a list, without what it says."""

    id: int
    message_id: UUID
    aggregate_type: str
    aggregate_id: str | None
    event_type: str
    state: MessageState
    created_at: datetime
    sent_at: datetime | None
    attempts: int
    last_error: str | None
    block: int | None = None
    line: int | None = None

    @property
    def place(self) -> Place | None:
        """Where a sent row is; None for another one."""
        if self.sent_at is None or self.block is None or self.line is None:
            return None
        return Place(self.sent_at.astimezone(UTC).date(), self.block, self.line)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some messages; `next` begins the page behind them, None at the end.

    Attributes:
        looked_until: the time up to which sent rows were looked through; None where the search has ended.
    """

    lines: list[FoundLine]
    next: str | None
    looked_until: datetime | None = None


SCANNED_COLUMNS = SQL("id, message_id, aggregate_type, aggregate_id, event_type, state, created_at, sent_at, attempts")
COLUMNS = SQL("{}, left(last_error, 500) AS last_error").format(SCANNED_COLUMNS)

# By lane for pending rows, whose index begins with it; but a key has an index that tells its rows by id.
OF_STATE = SQL("""
        SELECT {columns}, last_error FROM {schema}.message_state WHERE state = {state} AND id > {after} {key}
        ORDER BY id LIMIT {scanned}
""")
OF_LANES = SQL("""
        SELECT row.* FROM generate_series(0, 15) AS lane (number) CROSS JOIN LATERAL (
            SELECT {columns}, last_error FROM {schema}.message_state
            WHERE state = 'pending' AND lane = lane.number::smallint AND id > {after} ORDER BY id LIMIT {scanned}
        ) AS row ORDER BY row.id LIMIT {scanned}
""")
OF_STATES = SQL("SELECT * FROM ({states}) AS row ORDER BY id LIMIT {scanned}")
OF_KEY = SQL("AND aggregate_type = {} AND aggregate_id = {}")
OF_PENDING_KEY = SQL("{} AND hashtextextended(aggregate_id, 0) = hashtextextended({}, 0)")
SEARCH_WAITING = SQL("""
    WITH scanned AS MATERIALIZED ({rows})
    SELECT {columns}, (SELECT max(id) FROM scanned) AS last, (SELECT count(*) FROM scanned) AS looked
    FROM scanned WHERE {matches} ORDER BY id LIMIT {limit}
""")
END_OF_SCAN = SQL("SELECT max(id), count(*) FROM ({rows}) AS row")
# By lane, as the index of pending rows begins with it.
BY_ID = SQL("""
    SELECT * FROM {schema}.message_state
    WHERE state = 'pending' AND lane = ANY ('{{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}'::smallint[]) AND id = {row}
    UNION ALL
    SELECT * FROM {schema}.message_state WHERE state IN ({states}) AND id = {row}
""")
BY_MESSAGE_ID = SQL("SELECT * FROM {schema}.message_state WHERE state IN ('pending', {states}) AND message_id = {row}")
FIND_WAITING = SQL("SELECT {columns} FROM ({rows}) AS row ORDER BY id LIMIT 2")


def search(tables: Tables, wanted: Search, *, after: str | None = None) -> FoundPage:
    """Return a page of messages: those that wait by id, then the sent ones from the newest on.

    A row's id or message id is looked for among all that waits, then among the sent rows, whatever state is wanted.

    Raises:
        UsageError: `after` is no `next` of a page.
    """
    if wanted.row is not None:
        found = [] if after else _find_waiting(tables, wanted.row)
        return FoundPage(found, None) if found else _search_sent(tables, wanted, after)
    if wanted.state is MessageState.SENT:
        return _search_sent(tables, wanted, after)
    if wanted.state is not None:
        return _search_waiting(tables, wanted, after, states=(wanted.state,))
    lines: list[FoundLine] = []
    if after is None or after.isdigit():
        waits = _search_waiting(tables, wanted, after, states=WAITING)
        if waits.next is not None:
            return waits
        if len(waits.lines) == ROWS:
            is_last = _search_sent(tables, wanted, None, room=0).next is None
            return FoundPage(waits.lines, None if is_last else MessageState.SENT)
        lines, after = waits.lines, None
    sent = _search_sent(tables, wanted, None if after == MessageState.SENT else after, room=ROWS - len(lines))
    return FoundPage([*lines, *sent.lines], sent.next, sent.looked_until)


def rows_that_wait(tables: Tables, row: RowId) -> Composed:
    """Return the SELECT of the rows of an id or message id that were not sent."""
    states = SQL(", ").join(Literal(state) for state in WAITING if state is not MessageState.PENDING)
    return tables.sql(BY_ID if isinstance(row, int) else BY_MESSAGE_ID, states=states, row=Literal(row))


def _find_waiting(tables: Tables, row: RowId) -> list[FoundLine]:
    return tables.rows(FoundLine, FIND_WAITING, columns=COLUMNS, rows=rows_that_wait(tables, row))


def _search_waiting(tables: Tables, wanted: Search, after: str | None, *, states: Sequence[MessageState]) -> FoundPage:
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise UsageError(f"{after[:80]!r} begins no page")
    matches = _matches(wanted, "created_at")
    is_all = matches == SQL("true")
    scanned = ROWS + 1 if is_all else SCANNED
    arms = [_rows_of(tables, wanted, state, after=int(after or 0), scanned=scanned) for state in states]
    together = SQL(" UNION ALL ").join(SQL("({})").format(arm) for arm in arms)
    rows = OF_STATES.format(states=together, scanned=scanned)
    query = SEARCH_WAITING.format(rows=rows, columns=COLUMNS, matches=matches, limit=ROWS + 1)
    found = tables.execute(query).fetchall()
    lines = [FoundLine(*row[:-2]) for row in found]
    if len(lines) > ROWS:
        return FoundPage(lines[:ROWS], str(lines[ROWS - 1].id))
    if is_all:
        return FoundPage(lines, None)
    last, looked = found[0][-2:] if found else tables.one(END_OF_SCAN, rows=rows)
    return FoundPage(lines, str(last) if looked == SCANNED else None)


def _rows_of(tables: Tables, wanted: Search, state: MessageState, *, after: int, scanned: int) -> Composed:
    """Return the SELECT of the first rows of a state, all of them or those of a key."""
    parts = {"columns": SCANNED_COLUMNS, "after": after, "scanned": scanned, "state": state}
    if wanted.aggregate_type is None or wanted.aggregate_id is None:
        return tables.sql(OF_LANES if state is MessageState.PENDING else OF_STATE, **parts, key=SQL(""))
    key = OF_KEY.format(wanted.aggregate_type, wanted.aggregate_id)
    if state is MessageState.PENDING:
        key = OF_PENDING_KEY.format(key, wanted.aggregate_id)
    return tables.sql(OF_STATE, **parts, key=key)


def _matches(wanted: Search, at: str) -> Composed | SQL:
    """Return the conditions on a row, but for its state."""
    given = {
        "aggregate_type": wanted.aggregate_type,
        "aggregate_id": wanted.aggregate_id,
        "event_type": wanted.event_type,
        "message_id": wanted.row if isinstance(wanted.row, UUID) else None,
        "id": wanted.row if isinstance(wanted.row, int) else None,
    }
    parts: list[Composed] = [
        SQL("{} = {}").format(Identifier(name), Literal(value)) for name, value in given.items() if value is not None
    ]
    for compared, moment in ((SQL(">="), wanted.since), (SQL("<"), wanted.until)):
        if moment is not None:
            parts.append(SQL("{} {} {}").format(Identifier(at), compared, Literal(moment.isoformat())))
    return SQL(" AND ").join(parts) if parts else SQL("true")


OLDEST_DAY = SQL("""
    SELECT min(right(relname, 8)) FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = format('%%I.message_sent', %(schema)s::text)::regclass AND relname ~ '_[0-9]{{8}}$'
""")
OF_DAY = SQL("state = 'sent' AND sent_at >= {since} AND sent_at < {until}")
FIRST_OF_BLOCK = SQL("""
    SELECT sent_at FROM {schema}.message WHERE {of_day} AND ctid >= {low}::tid AND ctid < {high}::tid LIMIT 1
""")
SEARCH_SENT = SQL("""
    SELECT {columns}, split_part(trim(ctid::text, '()'), ',', 1)::bigint AS block,
           split_part(trim(ctid::text, '()'), ',', 2)::integer AS line
    FROM {schema}.message
    WHERE {of_day} AND ctid >= {low}::tid AND ctid < {high}::tid AND {matches}
    ORDER BY ctid DESC LIMIT {limit}
""")


def _search_sent(tables: Tables, wanted: Search, after: str | None, *, room: int = ROWS) -> FoundPage:
    oldest = _oldest_day(tables)
    if oldest is None:
        return FoundPage([], None)
    today = now(tables.connection).date()
    place = Place.of(after) if after else _start(tables, wanted, today)
    if place.day > today:
        place = Place(today, blocks_of_day(tables, today), 0)
    first = max(oldest, wanted.since.astimezone(UTC).date() if wanted.since else oldest)
    matches, lines, left = _matches(wanted, "sent_at"), list[FoundLine](), BLOCKS
    while place.day >= first:
        low = max(0, place.block + (1 if place.line else 0) - min(STEP, left))
        found = _of_blocks(tables, place, low=low, matches=matches, limit=room + 1 - len(lines))
        lines += found
        if len(lines) > room:
            return FoundPage(lines[:room], str(lines[room - 1].place))
        left -= place.block - low + 1
        if low and wanted.since and _is_before(tables, Place(place.day, low, 0), wanted.since):
            return FoundPage(lines, None)
        day = place.day - timedelta(days=1)
        place = Place(place.day, low, 0) if low else Place(day, blocks_of_day(tables, day), 0)
        if left <= 0 and place.day >= first:
            return FoundPage(lines, str(place), _time_at(tables, place))
    return FoundPage(lines, None)


def _of_blocks(tables: Tables, until: Place, *, low: int, matches: Composed | SQL, limit: int) -> list[FoundLine]:
    return tables.rows(
        FoundLine,
        SEARCH_SENT,
        columns=COLUMNS,
        of_day=of_day(until.day),
        low=f"({low},0)",
        high=f"({until.block},{until.line})",
        matches=matches,
        limit=limit,
    )


def _start(tables: Tables, wanted: Search, today: date) -> Place:
    """Return the place behind the last row that may match."""
    if wanted.until is None or wanted.until.astimezone(UTC).date() > today:
        return Place(today, blocks_of_day(tables, today), 0)
    day = wanted.until.astimezone(UTC).date()
    low, high = 0, blocks_of_day(tables, day)
    end = high
    while low < high:  # the first block whose rows were sent later
        middle = (low + high) // 2
        at = _time_at(tables, Place(day, middle, 0))
        if at is not None and at < wanted.until:
            low = middle + 1
        else:
            high = middle
    return Place(day, min(end, low + AROUND), 0)


def _is_before(tables: Tables, place: Place, moment: datetime) -> bool:
    """Whether the rows at a place, and all before it, were sent before a time."""
    at = _time_at(tables, Place(place.day, max(0, place.block + AROUND), 0))
    return at is not None and at < moment


def _time_at(tables: Tables, place: Place) -> datetime | None:
    low, high = f"({place.block},0)", f"({place.block + STEP},0)"
    row = tables.execute(FIRST_OF_BLOCK, of_day=of_day(place.day), low=low, high=high).fetchone()
    return row[0] if row else None


def of_day(day: date) -> Composed:
    """Return the condition by which the planner leaves out the other days."""
    return OF_DAY.format(since=f"{day:%Y-%m-%d}T00:00:00Z", until=f"{day + timedelta(days=1):%Y-%m-%d}T00:00:00Z")


def _oldest_day(tables: Tables) -> date | None:
    (day,) = tables.one(OLDEST_DAY, {"schema": tables.schema})
    return datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC).date() if day else None
