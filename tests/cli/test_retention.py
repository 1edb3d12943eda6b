"""`relay retention`: what would be dropped, what is, and why something is not."""

import json
from collections.abc import Iterator

import psycopg
import pytest

from tests.cli.command import Command
from tests.support.days import Days, InboxDays

OLD = 15  # days ago; 14 are kept
DROP = ("--yes", "--why", "a test", "--by", "ada")

BATCHES = """
    INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts, committed_at)
    SELECT 'nightly', n, 1, gen_random_uuid(), '{}', now() - interval '100 days' + interval '30 days' * (n / 4)
    FROM generate_series(1, 4) AS n
"""


@pytest.fixture
def days(database_url: str) -> Iterator[Days]:
    days = Days(database_url)
    with days.connection:
        yield days


def test_a_dry_run_tells_days_rows_and_bytes_and_drops_nothing(relay: Command, days: Days) -> None:
    days.add(OLD, 3)
    days.add(OLD + 1, 4)
    days.add(3, 5)

    result = relay("retention", "--dry-run")

    header, first, second, total = [line.split("\t") for line in result.out.splitlines()]
    assert (result.code, result.err) == (0, "")
    assert header == ["table", "day", "rows", "bytes", "fate", "reason"]
    assert [line[2] for line in (first, second)] == ["4", "3"]
    assert [line[4:] for line in (first, second)] == [["old", ""]] * 2
    assert total == [f"would drop 2 days: 7 rows, {int(first[3]) + int(second[3])} bytes"]
    assert days.past() == {3, OLD, OLD + 1}


def test_it_says_what_it_is_about_to_drop_and_drops_it(relay: Command, days: Days) -> None:
    days.add(OLD, 3)
    days.add(3, 5)

    result = relay("retention", *DROP)
    again = relay("retention", *DROP)

    assert result.code == 0
    assert result.err.startswith("drops 1 day: 3 rows, ")
    assert "\tdropped\t" in result.out
    assert "dropped 1 day: 3 rows, " in result.out
    assert (again.code, again.err, again.out.splitlines()[-1]) == (0, "", "dropped 0 days: 0 rows, 0 bytes")
    assert days.past() == {3}
    audited = days.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audited == [("retention", days.table(OLD).removeprefix("outbox."), "ada", "a test")]


def test_keep_goes_before_the_setting(relay: Command, days: Days) -> None:
    days.add(3, 5)

    kept = relay("retention", *DROP, "--keep", "3 days", RELAY_RETENTION="1 day")
    dropped = relay("retention", *DROP, RELAY_RETENTION="2 days")

    assert "dropped 0 days" in kept.out
    assert "dropped 1 day: 5 rows" in dropped.out


def test_json(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    told = json.loads(relay("retention", "--dry-run", "--output", "json").out)
    done = json.loads(relay("retention", *DROP, "--output", "json").out)

    assert (told["keep_days"], told["keep_inbox_days"], told["dry_run"], done["dry_run"]) == (14, 30, True, False)
    (day,) = done["days"]
    assert {name: day[name] for name in ("rows", "fate", "reason")} == {"rows": 3, "fate": "dropped", "reason": ""}
    assert f"outbox.{day['table']}" == days.table(OLD)
    assert day["bytes"] > 0
    assert told["days"] == [{**day, "fate": "old"}]


def test_what_is_postponed_is_named_with_its_reason(relay: Command, days: Days, database_url: str) -> None:
    days.add(OLD, 3)
    days.add(OLD + 1, 4)
    with psycopg.connect(database_url, application_name="report") as reader:
        pid = reader.info.backend_pid
        reader.execute(f"SELECT FROM {days.table(OLD)}".encode())  # of this day alone: its drop waits
        partly = relay("retention", *DROP)
        none = relay("retention", *DROP)

    assert (partly.code, none.code) == (3, 1)
    for result in (partly, none):
        assert "relay: postponed 1 day: 3 rows, " in result.err
        assert f"session {pid} (report)" in result.err
    assert relay("retention", *DROP).code == 0


@pytest.fixture
def inbox(database_url: str) -> Iterator[InboxDays]:
    inbox = InboxDays(database_url)
    with inbox.connection:
        yield inbox


def test_days_of_the_inbox_have_a_setting_of_their_own(relay: Command, days: Days, inbox: InboxDays) -> None:
    days.add(OLD, 3)
    for ago in (OLD, 31, 32):
        inbox.add(ago, 2)

    told = json.loads(relay("retention", "--dry-run", "--output", "json").out)
    done = relay("retention", *DROP)
    shorter = relay("retention", *DROP, "--keep-inbox", "14 days")

    assert [(f"outbox.{day['table']}", day["rows"]) for day in told["days"]] == [
        (days.table(OLD), 3),
        (inbox.table(32), 2),
        (inbox.table(31), 2),
    ]
    assert "dropped 3 days: 7 rows" in done.out
    assert "dropped 1 day: 2 rows" in shorter.out
    assert inbox.past() == set()


def test_an_inbox_elsewhere_is_named_and_the_tables_here_stay(
    relay: Command, days: Days, inbox: InboxDays, inbox_url: str
) -> None:
    days.add(OLD, 3)
    inbox.add(31, 2)
    elsewhere = InboxDays(inbox_url)
    with elsewhere.connection:
        elsewhere.add(31, 5)

        result = relay("retention", *DROP, "--inbox", inbox_url)
        unknown = relay("retention", *DROP, "--inbox", f"{inbox_url}_nowhere")

        assert elsewhere.past() == set()
    assert (result.code, "dropped 1 day: 5 rows" in result.out) == (0, True)
    assert (unknown.code, unknown.err.startswith("relay: --inbox: ")) == (1, True)
    assert (days.past(), inbox.past()) == ({OLD}, {31})


def test_an_inbox_remembers_for_as_long_as_sent_rows_are_kept(relay: Command, inbox: InboxDays) -> None:
    inbox.add(50, 2)

    refused = relay("retention", *DROP, "--keep", "20 days", "--keep-inbox", "10 days")
    setting = relay("retention", *DROP, RELAY_INBOX_RETENTION="10 days")
    kept = relay("retention", *DROP, "--keep", "60 days")

    assert (refused.code, setting.code, kept.code) == (2, 2, 0)
    assert "--keep-inbox '10 days' is less than sent rows are kept" in refused.err
    assert 'it takes days as in "30 days" or "30d", no fewer than those of relay.retention' in setting.err
    assert inbox.past() == {50}


@pytest.mark.parametrize("keep", ["0 days", "14", "2 weeks", "-1 days", "14 days ", "", "off"])
def test_nonsense_is_refused(relay: Command, keep: str) -> None:
    result = relay("retention", *DROP, "--keep", keep)

    assert (result.code, result.out) == (2, "")
    assert "--keep" in result.err


def test_nonsense_in_the_settings_is_refused_by_name(relay: Command) -> None:
    result = relay("retention", *DROP, RELAY_RETENTION="a fortnight")

    assert result.code == 2
    assert result.err.startswith("relay: relay.retention = 'a fortnight' (variable RELAY_RETENTION): it takes days")


def test_off_needs_a_keep(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    off = relay("retention", *DROP, RELAY_RETENTION="off")
    kept = relay("retention", *DROP, "--keep", "14 days", RELAY_RETENTION="off")

    assert (off.code, kept.code) == (2, 0)
    assert "retention is off" in off.err


def test_while_a_relay_drops_it_does_nothing(relay: Command, days: Days, database_url: str) -> None:
    days.add(OLD, 3)
    with psycopg.connect(database_url) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('outbox.retention', 0))")

        busy = relay("retention", *DROP)
        told = relay("retention", "--dry-run")

    assert (busy.code, told.code) == (1, 0)
    assert "another process drops old days" in busy.err


def test_another_schema_has_days_of_its_own(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    result = relay("retention", *DROP, RELAY_DATABASE_SCHEMA="elsewhere")

    assert result.code == 1
    assert "run `relay migrate`" in result.err
    assert days.past() == {OLD}


def test_names_of_batches_are_forgotten_where_a_setting_or_flag_says_so(relay: Command, days: Days) -> None:
    days.connection.execute(BATCHES)

    kept = relay("retention", *DROP)
    dry = relay("retention", "--dry-run", "--keep-batches", "90 days")
    wrong = relay("retention", *DROP, "--keep-batches", "some")
    done = json.loads(relay("retention", *DROP, "-o", "json", RELAY_BATCH_RETENTION="90 days").out)

    assert "batches" not in kept.out
    assert "would forget 3 names of Spark's batches, which are written if they come again\n" in dry.out
    assert (wrong.code, "--keep-batches takes days" in wrong.err) == (2, True)
    assert (done["keep_batches_days"], done["batches_forgotten"]) == (90, 3)
    assert days.connection.execute("SELECT version FROM outbox.batch ORDER BY 1").fetchall() == [(4,)]
    assert days.connection.execute("SELECT command, target FROM outbox.operator_audit").fetchall() == [
        ("retention", "batch")
    ]
