"""Parked rows go where the operator sends them, and a key keeps its order."""

import threading
from dataclasses import replace

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.config.settings import DatabaseSettings
from relay.errors import DatabaseUnavailableError, PartlyDoneError
from relay.operate.parked import work as parked
from relay.operate.parked.read import ParkedSelection, show_parked
from relay.operate.parked.work import ParkedDone
from relay.operate.session import session
from relay.servers.postgres.tables import Tables
from relay.testing.servers.process import wait_for
from tests.operate.rows import Rows
from tests.support.bulk import discard, preview, retry

EVERYTHING = ParkedSelection()
WAITERS = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
PENDING = ("pending", None)


def test_retry_gives_a_row_back_with_all_its_attempts(rows: Rows, connection: psycopg.Connection) -> None:
    row = rows.parked()

    done = retry(connection, "outbox", EVERYTHING)

    assert done == ParkedDone(chosen=1, released=0, not_found=[])
    found = rows.connection.execute(
        "SELECT state, attempts, last_error, parked_at, held_behind, available_at <= now() FROM outbox.message"
        " WHERE id = %s",
        [row],
    ).fetchone()
    assert found == ("pending", 0, None, None, None, True)


def test_retry_takes_along_what_is_held_behind_also_transitively(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked()
    follower = rows.parked(behind=head)
    second = rows.parked(behind=follower)
    other_head = rows.parked("2")
    other_follower = rows.parked("2", behind=other_head)

    done = retry(connection, "outbox", ParkedSelection(ids=[head]))

    assert done == ParkedDone(chosen=1, released=2, not_found=[])
    assert rows.states() == {
        head: PENDING,
        follower: PENDING,
        second: PENDING,
        other_head: ("parked", None),
        other_follower: ("parked", other_head),
    }


def test_discard_keeps_the_row_with_the_note_and_releases_what_is_behind(
    rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    head = rows.parked()
    follower = rows.parked(behind=head)

    done = discard(connection, "outbox", ParkedSelection(ids=[head]), by="ada", why="sent by hand")

    assert done == ParkedDone(chosen=1, released=1, not_found=[])
    assert rows.states() == {head: ("discarded", None), follower: PENDING}
    kept = show_parked(tables, head, length=100)
    assert kept.last_error == "returned: no queue is bound"
    assert (kept.set_aside_by, kept.set_aside_note, kept.set_aside_job) == ("ada", "sent by hand", done.job)
    assert kept.payload == '{"key": "1"}'


def test_a_row_waits_on_behind_the_next_parked_one_of_its_key(rows: Rows, connection: psycopg.Connection) -> None:
    first = rows.parked()
    between = rows.parked(behind=first)
    second = rows.parked()
    last = rows.parked(behind=first)
    after_last = rows.parked(behind=last)

    done = retry(connection, "outbox", ParkedSelection(ids=[first]))

    assert done.released == 1
    assert rows.states() == {
        first: PENDING,
        between: PENDING,
        second: ("parked", None),
        last: ("parked", second),
        after_last: ("parked", last),
    }


def test_rows_without_a_key_wait_for_nobody(rows: Rows, connection: psycopg.Connection) -> None:
    chosen, other = rows.parked(None), rows.parked(None)

    retry(connection, "outbox", ParkedSelection(ids=[chosen]))

    assert rows.states() == {chosen: PENDING, other: ("parked", None)}


def test_a_preview_changes_nothing(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked()
    rows.parked(behind=head)
    before = rows.states()

    assert preview(connection, "outbox", EVERYTHING) == ParkedDone(1, 1, [])
    assert rows.states() == before


def test_a_retry_rings_for_a_sleeping_relay(rows: Rows, connection: psycopg.Connection) -> None:
    rows.parked()
    rows.connection.execute('LISTEN "outbox.doorbell"')

    retry(connection, "outbox", EVERYTHING)

    assert [each.channel for each in rows.connection.notifies(timeout=5, stop_after=1)] == ["outbox.doorbell"]


def test_a_retry_waits_for_who_holds_the_park_lock(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked()
    with rows.connection.transaction():
        rows.connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('outbox.park', 0))")
        retrying = threading.Thread(target=retry, args=(connection, "outbox", EVERYTHING))
        retrying.start()
        wait_for(lambda: rows.connection.execute(WAITERS).rowcount > 0, "somebody waits for the park lock", 10)
        follower = rows.parked(behind=head)  # a relay that parks holds the lock
    retrying.join(10)

    assert rows.states() == {head: PENDING, follower: PENDING}


def test_all_goes_in_batches_and_ends_although_rows_come_back(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 2)
    heads = [rows.parked(str(number)) for number in range(5)]
    followers = [rows.parked(str(number), behind=head) for number, head in enumerate(heads)]

    first = retry(connection, "outbox", replace(EVERYTHING, limit=3))
    rest = retry(connection, "outbox", EVERYTHING)

    assert (first.chosen, rest.chosen) == (3, 2)
    assert first.released + rest.released == 5
    assert rows.states() == dict.fromkeys([*heads, *followers], PENDING)


def test_what_was_done_before_the_database_went_away_is_told(
    rows: Rows, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 1)
    heads = [rows.parked("1"), rows.parked("2")]
    rows.connection.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END'"
    )
    rows.connection.execute(
        "CREATE TRIGGER fail BEFORE UPDATE ON outbox.message_parked FOR EACH ROW"
        f" WHEN (OLD.id = {heads[1]}) EXECUTE FUNCTION fail()"
    )

    with pytest.raises(PartlyDoneError, match="1 rows are done, the others stay parked"), session(database) as tables:
        retry(tables.connection, "outbox", EVERYTHING)
    with pytest.raises(DatabaseUnavailableError), session(database) as tables:
        retry(tables.connection, "outbox", EVERYTHING)

    assert rows.states() == {heads[0]: PENDING, heads[1]: ("parked", None)}


Keys = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["head", "held", "free"])), max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=Keys, chosen=st.sets(st.integers(0, 7)), batch=st.integers(1, 3), is_retry=st.booleans())
def test_whatever_is_chosen_no_row_passes_a_parked_one_of_its_key(
    *,
    made: list[tuple[str, str]],
    chosen: set[int],
    batch: int,
    is_retry: bool,
    rows: Rows,
    connection: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are held behind any head of their key, as races and policies switched over may leave them."""
    rows.connection.execute("TRUNCATE outbox.message")
    monkeypatch.setattr(parked.ParkedWork, "most", batch)
    ids: list[int] = []
    heads: dict[str, list[int]] = {"a": [], "b": []}
    key_of: dict[int, str] = {}
    for key, kind in made:
        behind = heads[key][len(ids) % len(heads[key])] if kind == "held" and heads[key] else None
        row = rows.pending(key) if kind == "free" and not heads[key] else rows.parked(key, behind=behind)
        if rows.states()[row] == ("parked", None):
            heads[key].append(row)
        ids.append(row)
        key_of[row] = key
    before = rows.states()
    named = [ids[index] for index in chosen if index < len(ids) and before[ids[index]] == ("parked", None)]

    foreseen = preview(connection, "outbox", ParkedSelection(ids=named))
    done = (
        retry(connection, "outbox", ParkedSelection(ids=named))
        if is_retry
        else discard(connection, "outbox", ParkedSelection(ids=named), by="ada", why="chance")
    )

    after = rows.states()
    assert foreseen == done
    assert {row for row in ids if after[row] != before[row] and before[row][1] is None} == set(named)
    for row in ids:
        state, behind = after[row]
        if behind is not None:
            assert after[behind][0] == "parked", "held behind a row that has gone"
        if state == "pending" and before[row][1] is not None:
            in_front = [other for other in ids if other < row and key_of[other] == key_of[row]]
            assert all(after[other][0] != "parked" for other in in_front), "it passed a parked row of its key"
