"""What happens to both databases while sent rows are compared with the inbox."""

import pytest

from relay.errors import DatabaseUnavailableError, InboxUnavailableError
from tests.operate.inboxes import DAY, HOUR, Ends, figures


def test_what_is_applied_while_it_looks_is_not_missing(ends: Ends) -> None:
    sent = ends.send(5)
    ends.apply(sent[:1])

    def on_listed(what: str, done: int, total: int | None) -> None:
        if what == "listing what was sent":
            ends.apply(sent[1:])

    assert figures(ends.reconcile(show=on_listed)) == {"billing": (5, 5, 0, 0)}


@pytest.mark.parametrize(
    ("lost", "error", "words"),
    [
        ("inbox", InboxUnavailableError, "--inbox: the connection was lost: "),
        ("outbox", DatabaseUnavailableError, "the connection was lost: "),
    ],
)
def test_a_lost_connection_is_told_with_its_end(
    ends: Ends, lost: str, error: type[DatabaseUnavailableError], words: str
) -> None:
    ends.apply(ends.send(5))

    def end(what: str, done: int, total: int | None) -> None:
        if what == "listing what was sent":
            (ends.inbox if lost == "inbox" else ends.rows.connection).execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    with pytest.raises(error) as raised:
        ends.reconcile(show=end)

    assert type(raised.value) is error
    assert str(raised.value).startswith(words)


@pytest.mark.every_postgres
def test_nothing_stays_open_in_either_database(ends: Ends) -> None:
    ends.apply(ends.send(5))
    snapshots: list[int] = []

    def look(what: str, done: int, total: int | None) -> None:
        if what == "comparing":
            for connection in (ends.rows.connection, ends.inbox):
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL"
                    " AND backend_type = 'client backend'"  # and no autovacuum
                ).fetchone()
                snapshots.append(row[0] if row else -1)

    ends.reconcile(show=look)

    assert snapshots == [0, 0]


def test_a_day_that_is_dropped_meanwhile_makes_no_message_a_lost_one(ends: Ends) -> None:
    ends.apply(ends.send(5, ago=3 * DAY), ago=3 * DAY)
    [(day,)] = ends.rows.connection.execute("SELECT min(tableoid::regclass::text) FROM outbox.message").fetchall()
    ends.send(1, ago=2 * DAY)

    def drop(what: str, done: int, total: int | None) -> None:
        if what == "listing what was sent":
            ends.rows.connection.execute(f"DROP TABLE {day}")

    assert figures(ends.reconcile(since=9 * DAY, until=2 * DAY + HOUR, show=drop)) == {"billing": (0, 0, 0, 0)}
