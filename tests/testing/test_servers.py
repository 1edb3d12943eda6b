"""What a test gets of the private servers, and that they end with their owner."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import psycopg
import pytest

from relay.config.settings import Settings
from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import Process, ServerError, wait_for
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.revision import is_at_head

OWNER = """
import sys
from relay.testing.servers.postgres import PostgresServer
with PostgresServer() as server:
    print(server.pid, server._folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """Yield a process that owns a server."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.every_postgres
def test_a_test_gets_a_migrated_database(settings: Settings, postgres: PostgresServer, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        version = connection.info.server_version // 10_000

    assert version == postgres.version
    assert is_at_head(settings.database)


async def test_a_test_gets_a_virtual_host_of_its_own(broker_url: str, rabbitmq: RabbitServer) -> None:
    connection = await aio_pika.connect(broker_url)
    channel = await connection.channel()

    await channel.declare_queue("mine")

    assert rabbitmq.ctl("list_queues", "-p", broker_url.rpartition("/")[2], "name").split() == ["name", "mine"]
    await connection.close()


def test_a_wrong_password_is_refused(postgres: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(postgres.url("postgres", password="wrong"))


def test_a_server_keeps_its_data_through_a_crash_and_in_a_folder_that_was_given() -> None:
    with temporary_folder() as folder:
        with PostgresServer(folder=folder, durable=True) as server:
            with psycopg.connect(server.admin_url, autocommit=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
            server.crash()
            server.start()
        with PostgresServer(folder=folder, durable=True) as server, psycopg.connect(server.admin_url) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


def test_a_process_that_does_not_come_up_shows_its_words(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo no such luck; exit 3"], log=tmp_path / "log")

    with pytest.raises(ServerError, match="ended at once with code 3\nno such luck"):
        process.wait_until(lambda: False, 10)


def test_a_process_that_is_too_slow_is_ended(tmp_path: Path) -> None:
    process = Process(["sleep", "600"], log=tmp_path / "log")

    with pytest.raises(ServerError, match="sleep starts: not within"):
        process.wait_until(lambda: False, 0.1)

    assert not process.is_running()


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process(["bash", "-mc", "sleep 600 & echo $!; wait"], log=log)  # -m: the child has a process group
    process.wait_until(lambda: log.read_text().endswith("\n"), 10)

    process.stop(signal.SIGTERM)

    child = Path(f"/proc/{log.read_text().strip()}")
    wait_for(lambda: not child.exists(), "the child ends", 10)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_owner(owner: subprocess.Popen[str], how: signal.Signals) -> None:
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()

    owner.send_signal(how)
    owner.wait(20)

    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the server ends", 20)
    with temporary_folder(in_memory=True):  # it removes those of dead owners, unless another process is just doing it
        wait_for(lambda: not Path(folder).exists(), "the folder is removed", 20)


def test_the_servers_listen_on_loopback_only(postgres: PostgresServer, rabbitmq: RabbitServer) -> None:
    ports = {postgres.port, rabbitmq.port}
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]

    listening = [fields[1].split(":") for fields in table if fields[3] == "0A"]

    assert {(address, int(port, 16)) for address, port in listening if int(port, 16) in ports} == {
        ("0100007F", port) for port in ports
    }
    table6 = Path("/proc/net/tcp6").read_text()
    assert not any(f":{port:04X} " in table6 for port in ports)
