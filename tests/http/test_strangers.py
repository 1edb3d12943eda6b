"""Clients that are slow, rude or many: probes are answered meanwhile, and the relay keeps what it works with."""

import asyncio
import errno
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress

import psycopg
import pytest
from aiormq.exceptions import AMQPConnectionError, ConnectionClosed, ProbableAuthenticationError
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily, Metric
from structlog.testing import capture_logs

from relay.config.settings import Settings
from relay.errors import PublicReason
from relay.probes import server
from relay.probes.server import answering, read_request
from relay.runtime.hindrance import Hindrance
from relay.servers.postgres import database
from relay.servers.rabbitmq import connection as broker
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from tests.http.conftest import RelayProcess, StartRelay
from tests.http.site import Site
from tests.support.eventually import eventually
from tests.support.smuggling import SMUGGLED, smuggled

DRIPPING = 1_100
ORDINARY_LIMIT = 1_024  # file descriptors: what a shell and systemd give
LARGE = 20_000  # samples: an answer that no socket buffer takes


class Quiet:
    """What there is to tell: nothing, or a great deal."""

    def __init__(self, samples: int = 1) -> None:
        self.samples = samples
        self.reasons: dict[str, Hindrance] = {}

    def hindrances(self, _query: str) -> dict[str, Hindrance]:
        return self.reasons

    async def look(self) -> "Quiet":
        return self

    def __call__(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("large", "of many samples", labels=["number"])
        for number in range(self.samples):
            family.add_metric([f"{number:0100}"], number)
        yield family


@asynccontextmanager
async def serving(subject: Quiet | None = None) -> AsyncIterator[Site]:
    address = f"127.0.0.1:{free_port()}"
    async with answering(address, subject or Quiet()):
        yield Site(address)


def connected(site: Site) -> socket.socket:
    host, _, port = site.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def exchange(site: Site, sent: bytes) -> bytes:
    """Send these bytes, and give all that comes until the server ends it."""
    with connected(site) as client:
        with suppress(OSError):
            client.sendall(sent)
        answer = b""
        with suppress(ConnectionResetError):
            while data := client.recv(65536):
                answer += data
    return answer


async def status_of(site: Site, sent: bytes) -> int:
    answer = await asyncio.to_thread(exchange, site, sent)
    return int(answer.split()[1])


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@asynccontextmanager
async def dripping(site: Site, number: int) -> AsyncIterator[None]:
    """So many clients, each of which sends a byte of its request now and then, and comes back when it is dropped."""
    host, _, port = site.address.partition(":")
    begun = 0

    async def drip() -> None:
        nonlocal begun
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                with closing(writer):
                    begun += 1
                    writer.write(b"GET /livez HTTP/1.1\r\nSlowly: ")
                    while not writer.is_closing():
                        await asyncio.sleep(1)
                        writer.write(b"x")
                        await writer.drain()
            await asyncio.sleep(1)

    clients = [asyncio.create_task(drip()) for _ in range(number)]
    try:
        await eventually(lambda: begun >= number, "all have connected")
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process, which is the clients, open more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def relay(start_relay: StartRelay) -> RelayProcess:
    """A relay with the usual number of file descriptors, which is ready."""
    started = start_relay()
    resource.prlimit(started.process.pid, resource.RLIMIT_NOFILE, (ORDINARY_LIMIT, ORDINARY_LIMIT))
    await started.wait_for_log("relay.ready")
    await eventually(started.site.is_ready, "ready")
    return started


@pytest.mark.usefixtures("many_files")
async def test_slow_clients_stop_neither_probes_nor_the_relay(
    settings: Settings, postgres: PostgresServer, relay: RelayProcess
) -> None:
    pid = relay.process.pid
    async with dripping(relay.site, DRIPPING):
        for _ in range(10):
            assert (await relay.site.get("/livez")).status == 200
        assert (await relay.site.get("/metrics")).status == 200
        assert open_files(pid) < ORDINARY_LIMIT / 3
        assert len(os.listdir(f"/proc/{pid}/task")) < 20

        with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [settings.database.url.get_secret_value().rpartition("/")[2]],
            )
        await relay.wait_for_log("database.healed")
        await eventually(relay.site.is_ready, "ready again")


async def test_the_oldest_of_too_many_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    async with serving() as site:
        waiting = [connected(site) for _ in range(5)]

        assert (await site.get("/livez")).status == 200

        for client in waiting[:3]:
            assert await asyncio.to_thread(is_dropped, client)
        waiting[4].sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert (await asyncio.to_thread(waiting[4].recv, 65536)).endswith(b"ok\n")
        for client in waiting:
            client.close()


async def test_half_a_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 0.2)
    async with serving() as site:
        with connected(site) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost:")

            assert await asyncio.to_thread(is_dropped, client)


async def test_who_does_not_take_the_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Quiet(LARGE)) as site:
        before = open_files(os.getpid())
        whole = len(await asyncio.to_thread(exchange, site, b"GET /metrics HTTP/1.1\r\n\r\n"))
        monkeypatch.setattr(server, "ANSWER_TIMEOUT", 1.0)
        with connected(site) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asyncio.to_thread(client.recv, 1)
            await eventually(lambda: open_files(os.getpid()) <= before + 1, "the server closes its end")

            assert (await site.get("/livez")).status == 200
    assert whole > 100 * LARGE


async def test_large_requests_are_refused() -> None:
    async with serving() as site:
        assert await status_of(site, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n") == 414
        assert await status_of(site, b"x" * 100_000) == 414
        assert await status_of(site, b"GET /livez HTTP/1.1\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\n") == 431
        assert await status_of(site, b"GET /livez HTTP/1.1\r\n" + b"A: x\r\n" * 10_000) == 431
        assert (await site.get("/livez")).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1 more\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nAccept: a\rB: c\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\n\r\n", 404),
        (b"GET /livez HTTP/1.0\n\n", 200),
        (b"GET /livez HTTP/1.1\r\n\r\n" + b"\x00\xff" * 1000, 200),
        (b"GET /livez HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=one\r\n\r\n", 200),
    ],
)
async def test_what_is_no_request_gets_an_answer_and_nothing_more(sent: bytes, status: int) -> None:
    async with serving() as site:
        answer = await asyncio.to_thread(exchange, site, sent)

    assert int(answer.split()[1]) == status
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_what_is_smuggled_behind_a_request_gets_no_answer() -> None:
    async with serving() as site:
        told = {
            name: await asyncio.to_thread(
                exchange, site, smuggled(name, "/livez", site.address, "GET /metrics HTTP/1.1\r\n\r\n")
            )
            for name in SMUGGLED
        }

    assert {name: answer for name, answer in told.items() if answer.count(b"HTTP/1.1 ") != 1} == {}
    assert {int(answer.split()[1]) for answer in told.values()} == {200, 400}
    assert [name for name, answer in told.items() if b"outbox_build" in answer] == []


@trying(deadline=None)
@given(st.binary() | st.builds(b" ".join, st.lists(st.sampled_from([b"GET", b"/livez", b"HTTP/1.1", b"\r\nA: b"]))))
def test_no_bytes_at_all_are_too_much_for_the_reader(head: bytes) -> None:
    read_request(head)


async def test_other_methods_are_told_which_there_are() -> None:
    async with serving() as site:
        answer = await asyncio.to_thread(exchange, site, b"PUT /readyz HTTP/1.1\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/elsewhere"])
async def test_head_is_answered_like_get_without_the_body(path: str) -> None:
    async with serving() as site:
        got = await asyncio.to_thread(exchange, site, f"GET {path} HTTP/1.1\r\n\r\n".encode())
        head = await asyncio.to_thread(exchange, site, f"HEAD {path} HTTP/1.1\r\n\r\n".encode())

    lines, _, body = got.partition(b"\r\n\r\n")
    assert body
    assert names_of(head.removesuffix(b"\r\n\r\n")) == names_of(lines)
    assert head.endswith(b"\r\n\r\n")


async def test_a_client_that_has_said_all_gets_its_answer() -> None:
    async with serving() as site:
        with connected(site) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            client.shutdown(socket.SHUT_WR)

            assert (await asyncio.to_thread(client.recv, 65536)).endswith(b"ok\n")


async def test_connections_that_come_and_go_leave_nothing_behind() -> None:
    async with serving() as site:
        before = open_files(os.getpid())

        def come_and_go() -> None:
            for number in range(3_000):
                with connected(site) as client:
                    if number % 2:  # reset
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    if number % 3 == 0:
                        client.send(b"GET /metrics HTTP/1.1\r\n\r\n")

        await asyncio.to_thread(come_and_go)
        assert (await site.get("/livez")).status == 200
        await eventually(lambda: open_files(os.getpid()) <= before, "all is closed")


async def test_a_client_that_comes_at_the_end_makes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(Quiet):
        """Holds the server's thread: a client that comes and the end of the server meet in one turn of its loop."""

        is_held, is_free = threading.Event(), threading.Event()

        def __call__(self) -> Iterator[Metric]:
            self.is_held.set()
            assert self.is_free.wait(20)
            time.sleep(0.2)  # in which the server is told to end
            return super().__call__()

    subject = Hanging()
    async with serving(subject) as site:
        asking = asyncio.create_task(asyncio.to_thread(exchange, site, b"GET /metrics HTTP/1.1\r\n\r\n"))
        assert await asyncio.to_thread(subject.is_held.wait, 20)
        late = connected(site)
        subject.is_free.set()

    with late:
        await asking
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_few_file_descriptors_are_told_and_left_to_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with capture_logs() as told:
        async with serving() as site:
            before = open_files(os.getpid())
            clients = [connected(site) for _ in range(40)]
            assert (await site.get("/livez")).status == 200
            assert open_files(os.getpid()) - before - len(clients) <= 64 / server.SHARE  # both ends are ours
            for client in clients:
                client.close()

    assert "http.few_descriptors" in [event["event"] for event in told]


async def test_readiness_shows_strangers_the_parts_and_public_reasons_alone() -> None:
    subject = Quiet()
    refused = ConnectionRefusedError(111, "Connect call failed ('10.0.0.7', 5671)")
    forbidden = psycopg.OperationalError(
        'connection to server at "db.bank.internal" (10.0.0.8), port 5432 failed: FATAL:  password'
        ' authentication failed for user "payments"'
    )
    subject.reasons = {
        "broker": broker.hindrance_of(refused),
        "database": database.hindrance_of(forbidden),
        "overload": Hindrance("paused for 3 s: Overload: 429 from secret.example", "paused for 3 s"),
        "lanes": Hindrance("another relay has the name node-of-bank", PublicReason.NAMESAKE),
        "delivery": Hindrance.plain("nothing has settled for 6 s"),
        "pool": Hindrance("whatever"),
    }
    async with serving(subject) as site:
        answer = await site.get("/readyz")

    assert answer.status == 503
    assert answer.body.splitlines() == [
        "broker: connection refused",
        "database: access refused",
        "delivery: nothing has settled for 6 s",
        "lanes: another relay has its name",
        "overload: paused for 3 s",
        f"pool: {PublicReason.UNNAMED}",
    ]


@given(st.text(max_size=60), st.sampled_from(["connection refused", "timeout expired", "read-only", "SSL error"]))
def test_no_words_of_others_get_into_a_public_reason(words: str, known: str) -> None:
    for reason in (words, f"{words} {known} {words}"):
        errors = psycopg.OperationalError(reason), psycopg.errors.AdminShutdown(reason), psycopg.DataError(reason)
        assert all(database.public_reason(error) in set(PublicReason) for error in errors)
        ends = ConnectionClosed(320, reason), AMQPConnectionError(reason), OSError(113, reason), TimeoutError(reason)
        assert all(broker.public_reason(end) in set(PublicReason) for end in ends)


@pytest.mark.parametrize(
    ("error", "public"),
    [
        (ConnectionResetError(), PublicReason.CONNECTION_RESET),
        (socket.gaierror(-2, "Name or service not known"), PublicReason.UNNAMED),  # `hosts.addresses` names it
        (OSError(errno.EHOSTUNREACH, "Connect call failed"), PublicReason.NO_ROUTE),
        (ssl.SSLCertVerificationError("unknown authority"), PublicReason.TLS_FAILED),
        (ProbableAuthenticationError("Login was refused"), PublicReason.ACCESS_REFUSED),
        (ConnectionClosed(530, "NOT_ALLOWED - access to vhost"), PublicReason.ACCESS_REFUSED),
        (ConnectionClosed(320, "CONNECTION_FORCED - bye"), PublicReason.SESSION_ENDED),
        (ConnectionClosed(541, "INTERNAL_ERROR"), PublicReason.UNNAMED),
        (TimeoutError(), PublicReason.UNNAMED),
        (
            broker.BrokerSilentError("open a channel: no answer within 5 s", "no answer within 5 s"),
            "no answer within 5 s",
        ),
    ],
)
def test_the_type_of_a_broker_s_error_decides_what_strangers_may_know(error: BaseException, public: str) -> None:
    assert broker.public_reason(error) == public
    wrapped = AMQPConnectionError("as the library says it")
    wrapped.__cause__ = error
    assert broker.public_reason(wrapped) == public


@pytest.mark.parametrize(
    ("error", "public"),
    [
        (psycopg.errors.AdminShutdown("in any language"), PublicReason.SESSION_ENDED),
        (psycopg.errors.LockNotAvailable("in any language"), PublicReason.LOCK_TIMEOUT),
        (psycopg.errors.DiskFull("in any language"), PublicReason.NO_SPACE),
        (psycopg.errors.ReadOnlySqlTransaction("in any language"), PublicReason.READ_ONLY),
        (psycopg.errors.InsufficientPrivilege("in any language"), PublicReason.ACCESS_REFUSED),
        (psycopg.errors.CheckViolation("connection refused"), PublicReason.UNNAMED),
        (psycopg.OperationalError("FATAL:  sorry, too many clients already"), PublicReason.TOO_MANY_CONNECTIONS),
        (psycopg.OperationalError("could not translate host name"), PublicReason.NAME_NOT_RESOLVED),
    ],
)
def test_the_sqlstate_decides_what_strangers_may_know_of_a_statement(error: psycopg.Error, public: str) -> None:
    assert database.public_reason(error) == public


def is_dropped(client: socket.socket) -> bool:
    client.settimeout(5)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def names_of(head: bytes) -> list[bytes]:
    return [line.partition(b":")[0] for line in head.split(b"\r\n")]
