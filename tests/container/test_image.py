"""The image of the relay as an operator runs it, against real servers."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import LiteralString

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

import relay as package
from relay.testing.servers.process import wait_for
from tests.container.podman import BASE, ROOT, Podman
from tests.container.run import RelayImage
from tests.container.witness import LEFT, WITNESS, has_none, number, witness
from tests.faults.billing import WRITTEN, Writers
from tests.faults.checker import Checker, Invariant, assert_valid
from tests.support.eventually import eventually

pytestmark = [pytest.mark.images, pytest.mark.timeout(600)]  # the first test builds the image

MIB = 1024 * 1024
LARGEST = 200 * MIB  # above the base


SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_the_image_prints_the_roles_for_psql(relay: RelayImage) -> None:
    printed = relay("config", "roles")

    assert printed.code == 0, printed.err
    assert printed.out == (ROOT / "config" / "roles.sql").read_text()


async def test_migrate_and_run_carry_rows_and_sigterm_under_load_loses_nothing(
    relay: RelayImage, empty_database_url: str, broker_url: str
) -> None:
    migrated = relay("migrate")
    assert migrated.code == 0, migrated.err
    writers = Writers(empty_database_url, seed=4)
    await writers.prepare()
    async with (
        witness(broker_url) as queue,
        await psycopg.AsyncConnection.connect(empty_database_url, autocommit=True) as reader,
    ):
        first = relay.start()
        await asyncio.to_thread(first.wait_for_log, "relay.ready")
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writers.run(stop), name="writers")
            await eventually(lambda: has_more(reader, SENT, 500), "rows are carried", 60)
            code = await asyncio.to_thread(first.stop)
            stop.set()

        assert code == 0, first.log()
        assert "relay.stopped" in first.log()
        assert "drain.timed_out" not in first.log()
        assert await number(reader, LEFT) > 0  # it was stopped while there was work
        carried = await queue.declare()
        assert carried.message_count == await number(reader, SENT)  # what went out is marked, and nothing went twice

        second = relay.start()
        await eventually(lambda: has_none(reader, LEFT), "every row is sent", 60)
        assert await asyncio.to_thread(second.stop) == 0, second.log()

        checker = Checker(writers.history, empty_database_url, broker_url, [WITNESS], business=WRITTEN)
        findings = await checker.ask()
        assert_valid(findings, Invariant.NOTHING_LOST, Invariant.NOTHING_INVENTED, Invariant.IN_ORDER)
        assert len(checker.deliveries) == await number(reader, SENT)


def test_several_may_migrate_at_once(relay: RelayImage, empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(hashtextextended('outbox.migrate', 0))")
        replicas = [relay.start("migrate") for _ in range(3)]
        wait_for(lambda: connection.execute(WAITING).fetchone() == (3,), "all three wait for the lock", 60)
        connection.execute("SELECT pg_advisory_unlock_all()")

    assert [replica.wait_for_end() for replica in replicas] == [0, 0, 0]
    assert relay("migrate", "--check").code == 0


def test_it_is_ready_soon(relay: RelayImage, capsys: pytest.CaptureFixture[str]) -> None:
    relay("migrate")
    running = relay.start()
    running.wait_for_log("relay.ready")

    (ready,) = [event for event in running.events() if event["event"] == "relay.ready"]
    took = datetime.fromisoformat(ready["timestamp"]) - running.started_at()

    with capsys.disabled():
        print(f"\nimage relay: ready {took.total_seconds():.2f} s after its start")
    assert running.stop() == 0


def test_the_health_check_follows_the_relay(relay: RelayImage, empty_database_url: str) -> None:
    alone = relay("healthcheck", RELAY_NODE="nobody")
    assert (alone.code, alone.out) == (1, "")
    assert "run `relay migrate`" in alone.err

    relay("migrate")
    running = relay.start()
    running.wait_for_log("relay.ready")

    assert running.healthcheck().code == 0
    assert running.site.ask("/readyz").body == "ok\n"

    with closed(empty_database_url):
        running.wait_for_log("database.degraded")
        sick = running.healthcheck()
        assert sick.code == 1
        assert "is not currently accepting connections" in sick.err
        assert (running.site.ask("/readyz").status, running.site.ask("/livez").status) == (503, 200)
    running.wait_for_log("database.healed")
    assert running.healthcheck().code == 0

    assert running.stop() == 0
    assert "Traceback" not in running.log()


def test_what_is_logged_is_json(relay: RelayImage) -> None:
    relay("migrate")
    running = relay.start()
    running.wait_for_log("relay.ready")
    running.stop()

    events = [event["event"] for event in running.events()]

    assert [event for event in events if event.startswith("relay.")] == [
        "relay.ready",
        "relay.draining",
        "relay.stopped",
    ]


def test_sigterm_ends_it_also_before_it_has_started(relay: RelayImage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the connection and never answers
        waiting = relay.start(RELAY_DATABASE_URL=f"postgresql://127.0.0.1:{mute.getsockname()[1]}/x?connect_timeout=60")
        mute.settimeout(30)
        connection, _ = mute.accept()
        with connection:
            code = waiting.stop()

    assert code == 0, waiting.log()


@pytest.mark.parametrize("milliseconds", [0, 50, 100, 200])
def test_no_sigterm_after_its_start_is_lost(relay: RelayImage, milliseconds: int) -> None:
    starting = relay.start()
    time.sleep(milliseconds / 1000)

    code = starting.stop()

    assert code in {0, 128 + 15}, starting.log()  # the latter when Python itself has not started; 137: by SIGKILL
    assert "Traceback" not in starting.log()


def test_it_runs_as_whatever_user_the_platform_gives(podman: Podman, image: str) -> None:
    said = podman("run", "--rm", "--read-only", "--read-only-tmpfs=false", "--user=1000660000:0", image, "--version")

    assert (said.code, said.out) == (0, f"relay {package.__version__}, codec: compiled\n"), said.err


def test_it_says_what_it_is_and_has_nothing_to_build_with(
    podman: Podman, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [about] = json.loads(podman.do("image", "inspect", image))
    programs = "import shutil; print([p for p in ('java', 'pip', 'cc', 'gcc', 'spark-submit') if shutil.which(p)])"
    found = podman.do("run", "--rm", "--entrypoint=python", image, "-c", programs)

    labels = about["Config"]["Labels"]
    above_base = podman.size(image) - podman.size(BASE)
    with capsys.disabled():
        print(f"\nimage relay: {above_base / MIB:.0f} MiB above its base of {podman.size(BASE) / MIB:.0f} MiB")
    assert found == "[]"
    assert about["Config"]["User"] == "10001:10001"
    assert about["Healthcheck"]["Test"] == ["CMD", "relay", "healthcheck"]
    assert "RELAY_HTTP_LISTEN=0.0.0.0:8080" in about["Config"]["Env"]
    assert list(about["Config"]["ExposedPorts"]) == ["8080/tcp"]
    assert labels["org.opencontainers.image.title"] == "outbox-relay"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.description"]
    assert labels["org.opencontainers.image.version"] == package.__version__
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert above_base < LARGEST


@contextmanager
def closed(database_url: str) -> Iterator[None]:
    """Refuse connections to this database, and end its sessions."""
    name = database_url.rpartition("/")[2]
    with psycopg.connect(database_url.removesuffix(name) + "postgres", autocommit=True) as admin:
        admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(name)))
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(Identifier(name)))


async def has_more(reader: psycopg.AsyncConnection, query: LiteralString, than: int) -> bool:
    return await number(reader, query) > than
