"""A commit that waits for a synchronous standby is called so: the relay whose heartbeat it is lives."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from relay.operate import holders
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.finding import Verdict
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.support.template import template_of

BEAT = "INSERT INTO outbox.node (name, backend_pid, lanes, in_flight, state, reasons, version) \
    VALUES ('relay-1', pg_backend_pid(), '{}', 0, 'ok', '{}', '1')"
WAITING = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture
def waiting_url() -> Iterator[str]:
    """A database in which a relay's heartbeat waits for a standby that does not answer."""
    with PostgresServer() as server, ThreadPoolExecutor(1) as thread:
        url = server.create_database("stalled", template=template_of(server))
        with psycopg.connect(url, autocommit=True) as owner:
            owner.execute("ALTER SYSTEM SET synchronous_standby_names = 'away'")
            owner.execute("SELECT pg_reload_conf()")
            wait_for(lambda: shown(url) == "away", "new sessions wait for it", 20)
            beating = thread.submit(beat, url)
            wait_for(lambda: owner.execute(WAITING).rowcount == 1, "the commit waits", 20)
            yield url
            owner.execute("ALTER SYSTEM RESET synchronous_standby_names")
            owner.execute("SELECT pg_reload_conf()")
            beating.result()


def shown(url: str) -> str:
    with psycopg.connect(url) as connection:
        (value,) = connection.execute("SHOW synchronous_standby_names").fetchone() or ("",)
    return str(value)


def beat(url: str) -> None:
    with psycopg.connect(url, application_name="outbox-relay") as relay:
        relay.execute(BEAT)


def test_status_and_doctor_name_the_standby(waiting_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "STANDBY_SLOW", 0.0)
    settings = Settings(database=DatabaseSettings(url=SecretStr(waiting_url)))

    with psycopg.connect(waiting_url, autocommit=True) as connection:
        (reason,) = read_status(Tables(connection, "outbox")).reasons
    (found,) = [each for each in examine_database(settings) if each.check == "database.standby"]

    assert reason.startswith("1 commit waits for a synchronous standby for up to ")
    assert reason.endswith(" s, a relay's too: bring it back, or take it out of synchronous_standby_names")
    assert found.verdict is Verdict.FAILED
    assert found.remedy == "bring it back, or take it out of synchronous_standby_names"


def test_a_commit_that_has_just_begun_to_wait_is_no_reason(waiting_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "STANDBY_SLOW", 3600.0)

    with psycopg.connect(waiting_url, autocommit=True) as connection:
        assert read_status(Tables(connection, "outbox")).reasons == ["no relay is alive: start `relay run`"]
