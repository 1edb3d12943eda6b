"""`relay migrate --log`: one default, changed under live writers, and only where everybody can read the log."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.errors import BusyError
from relay.operate.lock_wait import LockLimits
from relay.operate.log_switch import is_on, switch_log
from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.support.log import IDS

pytestmark = pytest.mark.every_postgres

PLACES = (
    "SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'written') FROM outbox.message"
)
INSERT = "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', %s, 'e', '1')"


def switch(database: DatabaseSettings, *, on: bool) -> None:
    switch_log(database, on=on, ahead=2, ids=IDS)


def test_new_rows_go_to_the_log_and_back(rows: Rows, database: DatabaseSettings) -> None:
    rows.pending("1")
    switch(database, on=True)
    assert is_on(rows.connection, "outbox")
    rows.pending("2")
    switch(database, on=True)
    rows.pending("3")
    switch(database, on=False)
    assert not is_on(rows.connection, "outbox")
    rows.pending("4")

    assert rows.connection.execute(PLACES).fetchone() == (2, 2)
    assert rows.connection.execute("SELECT count(*) FROM outbox.message_log_far").fetchone() == (0,)


def test_the_command_says_where_rows_go(rows: Rows, relay: Command) -> None:
    on, off = relay("migrate", "--log", "on"), relay("migrate", "--log", "off")

    assert (on.code, on.out) == (0, "new rows of schema outbox go to the log\n")
    assert (off.code, off.out) == (0, "new rows of schema outbox go to the pending rows\n")
    assert rows.connection.execute("SELECT max(past) >> 24 FROM outbox.segment").fetchone() == (17,)
    assert relay("migrate", "--log", "on", "--check").code != 0


def test_an_older_relay_keeps_the_log_off(rows: Rows, database: DatabaseSettings) -> None:
    rows.node("old", version="0.0.9")
    rows.node("gone", version="0.0.9", age=3600)

    with pytest.raises(BusyError, match=r"^relay old of release 0\.0\.9 cannot read the log"):
        switch(database, on=True)
    assert not is_on(rows.connection, "outbox")
    switch(database, on=False)


def test_a_relay_whose_session_does_not_read_the_log_keeps_it_off(
    rows: Rows, database: DatabaseSettings, database_url: str
) -> None:
    """It may be of this release, without the log."""
    rows.node("old", version="0.1.0")
    live = "UPDATE outbox.node SET backend_pid = pg_backend_pid(), heartbeat_at = clock_timestamp()"
    with psycopg.connect(database_url, application_name="outbox-relay", autocommit=True) as session:
        session.execute(live)
        with pytest.raises(BusyError, match=r"^relay old of release 0\.1\.0 cannot read the log"):
            switch(database, on=True)

        session.execute("SET application_name = 'outbox-relay/log'")
        switch(database, on=True)
    assert is_on(rows.connection, "outbox")


@pytest.mark.parametrize("name", ["outbox-publisher 7", "outbox-spark"])
def test_an_older_client_keeps_the_log_off(
    rows: Rows, database: DatabaseSettings, database_url: str, name: str
) -> None:
    with psycopg.connect(database_url, application_name=name):
        with pytest.raises(BusyError, match=f"a session {name} cannot read the log"):
            switch(database, on=True)
        assert not is_on(rows.connection, "outbox")

    with psycopg.connect(database_url, application_name=name.replace("outbox-", "outbox-", 1) + "/log"):
        pass
    with psycopg.connect(database_url, application_name="outbox-spark/log"):
        switch(database, on=True)


def test_a_writer_that_stays_is_named_and_leaves_the_default_as_it_is(
    rows: Rows, database: DatabaseSettings, database_url: str
) -> None:
    told: list[str] = []
    with psycopg.connect(database_url) as writer:
        writer.execute(INSERT, ["1"])
        with pytest.raises(BusyError, match="the switch was not done"):
            switch_log(database, on=True, limits=LockLimits(0.2, 1.5), tell=told.append, ahead=2, ids=IDS)

    assert "outbox.message is held by" in told[0]
    assert not is_on(rows.connection, "outbox")


def test_live_writers_lose_no_row_and_meet_no_error(rows: Rows, database: DatabaseSettings, database_url: str) -> None:
    """They hold prepared statements, and the default changes under them again and again."""
    over = threading.Event()

    def write(number: int) -> int:
        written = 0
        with psycopg.connect(database_url, autocommit=True, prepare_threshold=0) as connection:
            while not over.is_set():
                with connection.transaction():
                    connection.execute(INSERT, [f"{number}"])
                written += 1
        return written

    with ThreadPoolExecutor(16) as threads:
        writers = [threads.submit(write, number) for number in range(16)]
        try:
            for on in (True, False, True):
                switch(database, on=on)
                before = rows.connection.execute(PLACES).fetchone()
                while (after := rows.connection.execute(PLACES).fetchone()) == before:
                    pass
                assert before is not None
                assert after is not None
                assert (after[1] > before[1]) is on
        finally:
            over.set()
        written = sum(writer.result(60) for writer in writers)

    assert rows.connection.execute("SELECT count(*), count(DISTINCT id) FROM outbox.message").fetchone() == (
        written, written,
    )  # fmt: skip
