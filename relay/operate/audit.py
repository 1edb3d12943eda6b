"""What operators have done and read: `operator_audit`, `dead_letter_audit` and the jobs as one list."""

import csv
import heapq
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from psycopg.sql import SQL
from pydantic import Field

from relay.errors import UsageError
from relay.observe.printable import printable
from relay.operate.asked import A_MOMENT, MAX_ID, MOST, Closed, Cursor, Id, Limit, Moment, Next, Page, Text
from relay.operate.operation import Role, Servers, operation
from relay.operate.sent.moment import parse_interval
from relay.operate.sent.selection import now
from relay.servers.postgres.tables import Tables

FORM = re.compile(r"([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})")

ROWS = SQL("""
    SELECT id, done_at, done_by, done_as, command, target, why, job, NULL::bigint AS rows, done_at AS last_at
    FROM {schema}.operator_audit
""")
LETTERS = SQL("""
    SELECT id, done_at, done_by, done_as, 'dead-letters ' || command AS command,
        concat_ws(' ', queue, message_id) AS target, why, job, NULL::bigint AS rows, done_at AS last_at
    FROM {schema}.dead_letter_audit
""")
# The audit has no row of a replay: it changes no message. The order has who and why.
JOBS = SQL("""
    SELECT id, made_at AS done_at, made_by AS done_by, made_as AS done_as,
        CASE source WHEN 'sent' THEN kind WHEN 'dead letter' THEN 'dead-letters ' || kind
            WHEN 'quarantined' THEN 'quarantine ' || kind ELSE 'parked ' || kind END AS command,
        CASE source WHEN 'sent' THEN id::text WHEN 'dead letter' THEN coalesce(filter ->> 'queue', '') ELSE '' END
            AS target,
        why, id AS job, done AS rows, saved_at AS last_at
    FROM {schema}.job
""")
ALL = SQL("true")
# Each source, what the list shows of it, and what the list of all rows shows of it.
# A job is one line, which its order gives, and one for each time that an operator turned it. In the list of all rows
# stands the order of a replay alone: its rows have no line. Migration 0036 has indexes with the first two conditions.
SOURCES = (
    (ROWS, SQL("(job IS NULL OR starts_with(command, 'jobs ') OR command = 'replay cancel')"), ALL),
    (LETTERS, SQL("job IS NULL"), ALL),
    (JOBS, ALL, SQL("command = 'replay'")),
)
READ = SQL("""
    SELECT * FROM ({source}) AS deed
    WHERE id < %(before)s
        AND (%(by)s::text IS NULL OR strpos(lower(done_by), lower(%(by)s)) > 0)
        AND (%(command)s::text IS NULL OR command = %(command)s OR starts_with(command, %(command)s || ' '))
        AND (%(job)s::bigint IS NULL OR job = %(job)s)
        AND (%(since)s::timestamptz IS NULL OR last_at >= %(since)s)
        AND (%(until)s::timestamptz IS NULL OR done_at < %(until)s)
        AND {is_listed}
    ORDER BY id DESC
    LIMIT %(limit)s
""")
NOTE = SQL("""
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    VALUES (%(command)s, %(target)s, %(by)s, %(why)s)
""")


@dataclass(frozen=True, slots=True)
class Deed:
    """What a user or a program has done to one row, letter, job or day, or has read; or a job with all its rows."""

    id: int  # in its table
    done_at: datetime
    done_by: str
    done_as: str  # the database login
    command: str
    target: str
    why: str | None
    job: int | None
    rows: int | None  # that the job has done; None: the line is no job
    last_at: datetime  # of a job: when it saved its last step


class AuditFilter(Closed):
    """Which deeds, and whether each row of a job has a line."""

    by: Annotated[Text | None, Field(description="By whom; a part of the name is enough.")] = None
    command: Annotated[Text | None, Field(description="As in `parked retry`; `parked` is all commands of it.")] = None
    job: Annotated[Id | None, Field(description="Of this job.")] = None
    since: Annotated[Moment, Field(description=f"At or after {A_MOMENT}.")] = None
    until: Annotated[Moment, Field(description="Before.")] = None
    rows: Annotated[bool, Field(description="A line for each row of a job, not one for the job.")] = False


class ListAudit(AuditFilter):
    """Which page of which deeds."""

    cursor: Cursor = None
    limit: Limit = 100


class AuditPage(Page):
    """A page of deeds, the newest first."""

    deeds: list[Deed]
    next: Next


def note(tables: Tables, command: str, target: str, *, by: str, why: str | None) -> None:
    """Note what an operator does to one thing, in the caller's transaction."""
    values = {"command": command, "target": target, "by": by, "why": why}
    tables.execute(NOTE, values)


@operation("audit.list", "GET /audit", Role.VIEWER)
def list_(at: Servers, asked: ListAudit) -> AuditPage:
    """List who has changed or revealed what, and why: the newest first, a job in one line."""
    befores = _befores(asked.cursor)
    pages: list[list[tuple[int, Deed]]] = []
    with at.connect(None) as tables:
        since, until = parse_interval(asked.since, asked.until, now(tables.connection))
        values = {
            "by": asked.by or None,
            "command": asked.command or None,
            "job": asked.job,
            "since": since,
            "until": until,
        }
        for number, ((source, listed, listed_rows), before) in enumerate(zip(SOURCES, befores, strict=True)):
            parts = {"source": tables.sql(source), "is_listed": listed_rows if asked.rows else listed}
            found = tables.rows(Deed, READ, values | {"before": before, "limit": asked.limit + 1}, **parts)
            pages.append([(number, deed) for deed in found])
    merged = list(heapq.merge(*pages, key=lambda each: each[1].done_at, reverse=True))
    shown = merged[: asked.limit]
    if len(merged) == len(shown):
        return AuditPage(deeds=[deed for _, deed in shown], next=None)
    for number, deed in shown:
        befores[number] = deed.id
    return AuditPage(deeds=[deed for _, deed in shown], next="-".join(map(str, befores)))


def _befores(cursor: str | None) -> list[int]:
    if cursor is None:
        return [MAX_ID for _ in SOURCES]
    found = FORM.fullmatch(cursor)
    befores = [int(each) for each in found.groups()] if found else []
    if not befores or max(befores) > MAX_ID:
        raise UsageError("cursor: it is not `next` of an earlier page of the audit")
    return befores


COLUMNS = ("done at", "last at", "done by", "login", "command", "target", "rows", "why", "job")
# A spreadsheet takes a cell that begins so for a formula; behind an apostrophe it is text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def as_csv(deeds: Iterable[Deed], *, header: bool) -> str:
    """Return lines of CSV, whose cells are no formulas and have no character that a terminal acts on."""
    text = io.StringIO()
    writer = csv.writer(text)
    if header:
        writer.writerow(COLUMNS)
    for deed in deeds:
        writer.writerow([_cell(each) for each in line_of(deed)])
    return text.getvalue()


def line_of(deed: Deed) -> tuple[object, ...]:
    """Return the values of COLUMNS."""
    last = deed.last_at.isoformat() if deed.rows is not None else None
    told = (deed.done_by, deed.done_as, deed.command, deed.target, deed.rows, deed.why, deed.job)
    return (deed.done_at.isoformat(), last, *told)


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return ("'" if text.lstrip(" ").startswith(FORMULA) else "") + printable(text)


def pages_of(at: Servers, asked: ListAudit) -> Iterator[list[Deed]]:
    """Yield all deeds that are asked for, page by page."""
    cursor = asked.cursor
    while True:
        found = list_.does(at, asked.model_copy(update={"cursor": cursor, "limit": MOST}))
        yield found.deeds
        if (cursor := found.next) is None:
            return
