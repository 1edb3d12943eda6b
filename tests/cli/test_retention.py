"""`relay retention`: what would be dropped, what is, and why something is not."""

import json
from collections.abc import Iterator

import psycopg
import pytest

from relay.engine import retention
from tests.cli.command import Command
from tests.support.days import Days

OLD = 15  # days ago; 14 are kept


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
    assert header == ["day", "rows", "bytes", "fate", "reason"]
    assert [line[1] for line in (first, second)] == ["4", "3"]
    assert [line[3:] for line in (first, second)] == [["old", ""]] * 2
    assert total == [f"would drop 2 days: 7 rows, {int(first[2]) + int(second[2])} bytes"]
    assert days.past() == {3, OLD, OLD + 1}


def test_it_says_what_it_is_about_to_drop_and_drops_it(relay: Command, days: Days) -> None:
    days.add(OLD, 3)
    days.add(3, 5)

    result = relay("retention")
    again = relay("retention")

    assert result.code == 0
    assert result.err.startswith("drops 1 day: 3 rows, ")
    assert "\tdropped\t" in result.out
    assert "dropped 1 day: 3 rows, " in result.out
    assert (again.code, again.err, again.out.splitlines()[-1]) == (0, "", "dropped 0 days: 0 rows, 0 bytes")
    assert days.past() == {3}


def test_keep_goes_before_the_setting(relay: Command, days: Days) -> None:
    days.add(3, 5)

    kept = relay("retention", "--keep", "3 days", RELAY_RELAY__RETENTION="1 day")
    dropped = relay("retention", RELAY_RELAY__RETENTION="2 days")

    assert "dropped 0 days" in kept.out
    assert "dropped 1 day: 5 rows" in dropped.out


def test_json(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    told = json.loads(relay("retention", "--dry-run", "--output", "json").out)
    done = json.loads(relay("retention", "--output", "json").out)

    assert (told["keep_days"], told["dry_run"], done["dry_run"]) == (14, True, False)
    (day,) = done["days"]
    assert {name: day[name] for name in ("rows", "fate", "reason")} == {"rows": 3, "fate": "dropped", "reason": ""}
    assert f"outbox.{day['table']}" == days.table(OLD)
    assert day["bytes"] > 0
    assert told["days"] == [{**day, "fate": "old"}]


def test_what_is_postponed_is_named_with_its_reason(
    relay: Command, days: Days, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOCK_TIMEOUT", 0.2)
    days.add(OLD, 3)
    days.add(OLD + 1, 4)
    with psycopg.connect(database_url, application_name="report") as reader:
        pid = reader.info.backend_pid
        reader.execute(f"SELECT FROM {days.table(OLD)}".encode())  # of this day alone: its drop waits
        partly = relay("retention")
        none = relay("retention")

    assert (partly.code, none.code) == (3, 1)
    for result in (partly, none):
        assert "relay: postponed 1 day: 3 rows, " in result.err
        assert f"session {pid} (report)" in result.err
    assert relay("retention").code == 0


@pytest.mark.parametrize("keep", ["0 days", "14", "2 weeks", "-1 days", "14 days ", "", "off"])
def test_nonsense_is_refused(relay: Command, keep: str) -> None:
    result = relay("retention", "--keep", keep)

    assert (result.code, result.out) == (2, "")
    assert "--keep" in result.err


def test_nonsense_in_the_settings_is_refused_by_name(relay: Command) -> None:
    result = relay("retention", RELAY_RELAY__RETENTION="a fortnight")

    assert result.code == 2
    assert result.err.startswith(
        "relay: relay.retention = 'a fortnight' (variable RELAY_RELAY__RETENTION): it takes days"
    )


def test_off_needs_a_keep(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    off = relay("retention", RELAY_RELAY__RETENTION="off")
    kept = relay("retention", "--keep", "14 days", RELAY_RELAY__RETENTION="off")

    assert (off.code, kept.code) == (2, 0)
    assert "retention is off" in off.err


def test_while_a_relay_drops_it_does_nothing(relay: Command, days: Days, database_url: str) -> None:
    days.add(OLD, 3)
    with psycopg.connect(database_url) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('outbox.retention', 0))")

        busy = relay("retention")
        told = relay("retention", "--dry-run")

    assert (busy.code, told.code) == (1, 0)
    assert "another process drops old days" in busy.err


def test_another_schema_has_days_of_its_own(relay: Command, days: Days) -> None:
    days.add(OLD, 3)

    result = relay("retention", RELAY_DATABASE__SCHEMA="elsewhere")

    assert result.code == 1
    assert "run `relay migrate`" in result.err
    assert days.past() == {OLD}
