"""The audit has the deeds of its tables in their order, each on one page; a job is one line, and CSV has no formula."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from relay.config.settings import DatabaseSettings, Settings
from relay.console.pages.audit import COMMANDS
from relay.errors import UsageError
from relay.operate.asked import MOST
from relay.operate.audit import AuditPage, Deed, ListAudit, list_
from relay.operate.operation import Role, Servers
from relay.operate.session import session
from tests.cli.command import Command
from tests.console.site import browser, log_in, running, users

ROWS = """
    INSERT INTO outbox.operator_audit (done_at, done_by, command, target, why)
    SELECT timestamptz '2026-11-27' + n * interval '2 min', 'ada', 'parked retry', n::text, 'mended'
    FROM generate_series(1, 7) AS n
"""
LETTERS = """
    INSERT INTO outbox.dead_letter_audit (done_at, done_by, command, why, queue, message_id)
    SELECT timestamptz '2026-11-27' + n * interval '3 min', 'ada', 'discard', 'test', 'q.dead', 'm' || n
    FROM generate_series(1, 5) AS n
"""
REPLAYS = """
    INSERT INTO outbox.job (kind, source, made_at, saved_at, made_by, why, filter)
    SELECT 'replay', 'sent', timestamptz '2026-11-27' + n * interval '5 min',
        timestamptz '2026-11-27' + n * interval '5 min', 'grace', 'asked for by the customer', '{}'
    FROM generate_series(1, 3) AS n
"""
# A job of so many rows, which took until the next day, and an operator paused it.
JOB = """
    WITH job AS (
        INSERT INTO outbox.job (kind, source, made_at, saved_at, made_by, why, filter, done)
        VALUES ('retry', 'parked', '2026-11-27T12:00Z', '2026-11-28T12:00Z', 'lin', 'the broker is back', '{}',
            %(rows)s)
        RETURNING id
    ), done AS (
        INSERT INTO outbox.operator_audit (done_at, done_by, command, target, why, job)
        SELECT timestamptz '2026-11-27T12:00Z' + n * interval '1 s', 'lin', 'parked retry', n::text,
            'the broker is back', job.id
        FROM job, generate_series(1, %(rows)s) AS n
    )
    SELECT id FROM job
"""
TURNED = """
    INSERT INTO outbox.operator_audit (done_at, done_by, command, target, why, job)
    VALUES ('2026-11-28T11:00Z', 'ada', 'jobs pause', %(job)s::text, 'lunch', %(job)s::bigint)
"""


@pytest.fixture
def written(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def deeds(written: psycopg.Connection) -> int:
    for statement in (ROWS, LETTERS, REPLAYS):
        written.execute(statement)
    return 15


def job_of(written: psycopg.Connection, rows: int) -> int:
    found = written.execute(JOB, {"rows": rows}).fetchone()
    assert found is not None
    written.execute(TURNED, {"job": found[0]})
    return int(found[0])


def read(database: DatabaseSettings, **asked: object) -> AuditPage:
    at = Servers(Settings(database=database), lambda _: session(database))
    return list_.does(at, ListAudit.model_validate(asked))


def listed(database: DatabaseSettings, **asked: object) -> list[Deed]:
    """Return what all pages have."""
    page = read(database, **asked)
    found = [*page.deeds]
    while page.next is not None:
        page = read(database, **asked, cursor=page.next)
        found += page.deeds
    return found


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
@pytest.mark.parametrize("rows", [False, True])
def test_the_pages_have_each_deed_once_in_order(database: DatabaseSettings, deeds: int, limit: int, rows: bool) -> None:
    found = listed(database, limit=limit, rows=rows)

    assert len({(deed.command, deed.id) for deed in found}) == len(found) == deeds
    assert [deed.done_at for deed in found] == sorted((deed.done_at for deed in found), reverse=True)


def test_a_job_is_one_line_and_each_row_when_that_is_asked(
    database: DatabaseSettings, written: psycopg.Connection
) -> None:
    job = job_of(written, 3)
    folded, unfolded = listed(database), listed(database, job=job, rows=True)

    assert [(each.command, each.done_by, each.rows, each.job) for each in folded] == [
        ("jobs pause", "ada", None, job),
        ("parked retry", "lin", 3, job),
    ]
    assert [(each.command, each.target) for each in unfolded] == [
        ("jobs pause", str(job)),
        *(("parked retry", str(row)) for row in (3, 2, 1)),
    ]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"by": "LI"}, ["parked retry"]),
        ({"by": "l%"}, []),
        ({"command": "jobs pause"}, ["jobs pause"]),
        ({"command": "jobs"}, ["jobs pause"]),
        ({"command": "job"}, []),
        ({"since": "2026-11-28T11:30Z"}, ["parked retry"]),
        ({"since": "2026-11-28T13:00Z"}, []),
        ({"until": "2026-11-27T12:00:01Z"}, ["parked retry"]),
        ({"until": "2026-11-27T12:00Z"}, []),
    ],
    ids=str,
)
def test_each_filter_selects_what_it_says(
    database: DatabaseSettings, written: psycopg.Connection, asked: dict[str, str], found: list[str]
) -> None:
    job_of(written, 2)

    assert [each.command for each in listed(database, **asked)] == found


@pytest.mark.parametrize("cursor", ["x", "1", "1-1", f"1-1-{2**63}"])
def test_what_is_no_place_is_refused(database: DatabaseSettings, cursor: str) -> None:
    with pytest.raises(UsageError, match="cursor"):
        read(database, cursor=cursor)


def test_each_command_that_the_audit_takes_can_be_chosen(written: psycopg.Connection) -> None:
    row = written.execute(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'operator_audit_command'"
    ).fetchone()
    assert row is not None

    assert {*re.findall(r"'([^']+)'", row[0])} | {"dead-letters retry", "dead-letters discard", "replay"} == {*COMMANDS}


async def test_a_viewer_sees_filters_and_downloads(
    settings: Settings, tmp_path: Path, deeds: int, written: psycopg.Connection
) -> None:
    job = job_of(written, 3)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        whole = await client.get("/audit")
        chosen = await client.get("/audit", params={"by": "grace", "job": "", "command": "", "since": ""})
        wrong = [await client.get("/audit", params=each) for each in ({"job": "seven"}, {"since": "soon"})]
        file = await client.get("/audit.csv", params={"job": job, "rows": "true"})

    assert len(re.findall("<tr>", whole.text)) == deeds + 2 + 1
    assert f'<a href="/audit?job={job}&amp;rows=true">3 rows</a>' in whole.text
    assert chosen.text.count('<td data-label="Who" class="name">grace</td><td data-label="What">replay</td>') == 3
    assert '<td data-label="What">parked retry</td>' not in chosen.text
    assert [each.status_code for each in wrong] == [200, 200]
    assert all('class="notice failed" role="alert">' in each.text for each in wrong)
    assert len(lines_of(file)) == 1 + 4


def lines_of(file: httpx.Response) -> list[list[str]]:
    assert file.status_code == 200
    assert file.headers["content-type"] == "text/csv; charset=utf-8"
    assert file.headers["content-disposition"] == 'attachment; filename="audit.csv"'
    return [*csv.reader(io.StringIO(file.text))]


async def test_no_cell_of_the_file_is_a_formula(client: httpx.AsyncClient, written: psycopg.Connection) -> None:
    texts = ['=HYPERLINK("http://x")', "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\uff1d1", 'a","=1', "a\r\n=1", "\x1b[2J"]
    for text in texts:
        note = "INSERT INTO outbox.operator_audit (done_by, command, target, why) VALUES (%s, 'retention', '1', %s)"
        written.execute(note, [text, text])

    lines = lines_of(await client.get("/audit.csv"))

    assert [len(line) for line in lines] == [9] * (1 + len(texts))
    assert not [cell for line in lines for cell in line if re.match(r"\s*[=+\-@\uff1d]", cell)]
    assert not [cell for line in lines for cell in line if not cell.isprintable()]


async def test_the_file_has_all_pages(client: httpx.AsyncClient, written: psycopg.Connection) -> None:
    job = job_of(written, MOST + 1)

    assert len(lines_of(await client.get(f"/audit.csv?job={job}&rows=true"))) == 1 + MOST + 2


def test_the_command_line_lists_the_same(
    database_url: str, tmp_path: Path, written: psycopg.Connection, deeds: int
) -> None:
    job = job_of(written, 2)
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url)

    table = [line.split("\t")[1:5] for line in relay("audit", "list", "--by", "lin").out.splitlines()]
    rows = relay("audit", "list", "--job", str(job), "--rows", "-o", "csv").out.splitlines()
    refused = relay("audit", "list", "--since", "soon")

    assert table == [["by", "command", "target", "rows"], ["lin", "parked retry", "", "2"]]
    assert len(rows) == 4
    assert (refused.code, "--since takes a moment" in refused.err) == (2, True)
