"""`relay pool`: who holds which partition, and what waits."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from yarl import URL

from relay.testing.servers.process import Process, wait_for
from tests.cli.command import RELAY, Command
from tests.operate.pools import MEMBERS
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way

MASTER = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 0 AND objsubid = 2"


@pytest.fixture
def relay(tmp_path: Path, database_url: str, broker_url: str) -> Command:
    return Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def test_the_status_of_a_pool(relay: Command, connection: psycopg.Connection) -> None:
    connection.execute(MEMBERS)

    result = relay("pool", "status", "--output", "json")

    assert (result.code, result.err) == (0, "")
    told = json.loads(result.out)
    (pool,) = told["pools"]
    assert (told["master"], pool["name"], pool["queue"], pool["dead_letters"]) == (None, "totals", "billing", None)
    a, b = pool["members"]
    assert (a["name"], a["partitions"], a["unacknowledged"], b["late"]) == ("a", [0], 7, True)
    assert [(each["epoch"], each["member"], each["wanted_by"]) for each in pool["partitions"]] == [
        (3, "a", "b"),
        (1, "b", None),
        (0, None, None),
    ]
    assert told["reasons"] == [
        "no master: start `relay run` or `relay pool run` on this database",
        "member b of pool totals does not check in",
        "nobody holds partition 2 of pool totals",
    ]


def test_in_a_pipe_each_line_says_what_it_is(relay: Command, connection: psycopg.Connection) -> None:
    connection.execute(MEMBERS)

    lines = [line.split("\t") for line in relay("pool", "status").out.splitlines()]

    assert [line[0] for line in lines] == ["master", *["reason"] * 3, "pool", *["member"] * 2, *["partition"] * 3]
    assert lines[4] == ["pool", "totals", "billing", "?", "?"]


def test_a_pool_that_nobody_has_been_in(relay: Command) -> None:
    result = relay("pool", "status", "totals")

    assert (result.code, result.out) == (1, "")
    assert result.err == "relay: no pool totals: a pool is there once a member of it was\n"


def test_a_name_that_no_queue_can_have_takes_no_status_away(relay: Command, connection: psycopg.Connection) -> None:
    connection.execute(MEMBERS)
    connection.execute("UPDATE outbox.pool SET queue = '<b>'")

    result = relay("pool", "status", "--output", "json")

    assert result.code == 0, result.err
    assert json.loads(result.out)["pools"][0]["dead_letters"] is None


def test_without_a_broker_the_rest_is_told(relay: Command, connection: psycopg.Connection) -> None:
    connection.execute(MEMBERS)

    result = relay("pool", "status", "--output", "json", RELAY_BROKER_URL="amqp://guest:guest@127.0.0.1:9/")

    told = json.loads(result.out)
    assert any("the broker does not tell how many messages wait" in reason for reason in told["reasons"])
    assert told["pools"][0]["partitions"][0]["ready"] is None


def test_a_candidate_ends_in_order(relay: Command, connection: psycopg.Connection, tmp_path: Path) -> None:
    def is_master() -> bool:
        row = connection.execute(MASTER).fetchone()
        return row == (1,)

    process = Process([RELAY, "pool", "run"], log=tmp_path / "log", environment=relay.environment({}))
    try:
        wait_for(is_master, "it is the master", 30)
        assert relay("pool", "status").out.startswith("master\t")
    finally:
        process.stop(signal.SIGTERM)

    assert process.returncode == 0
    assert not is_master()


class Overheard(FaultProxy):
    """A proxy that notes when the client says something."""

    asked = False

    def comes(self, connection: int, way: Way, data: bytes) -> None:  # noqa: ARG002
        self.asked |= way is Way.UP


async def test_a_candidate_beside_a_silent_database_ends_in_its_time(database_url: str, tmp_path: Path) -> None:
    url = URL(database_url)
    log = tmp_path / "log"
    async with Overheard("127.0.0.1", url.port or 0, amqp=False) as proxy:
        relay = Command(tmp_path, RELAY_DATABASE_URL=str(url.with_port(proxy.port)))
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:

            async def is_master() -> bool:
                return await (await connection.execute(MASTER)).fetchone() == (1,)

            process = Process([RELAY, "pool", "run"], log=log, environment=relay.environment({}))
            try:
                await eventually(is_master, "it is the master")
                proxy.hold(Way.DOWN)
                proxy.asked = False
                await eventually(lambda: proxy.asked, "it waits for an answer")
                process.tell(signal.SIGTERM)
                await eventually(lambda: not process.is_running(), "it ends", within=25)  # a statement may take 30 s
            finally:
                process.stop(signal.SIGKILL)

    assert process.returncode == 0
    assert "Traceback" not in log.read_text()
