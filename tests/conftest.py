"""Real servers for every test: started when the first test asks, once a process of the run, ended with it.

A test gets its own database, made from a migrated template, and its own virtual host.
`@pytest.mark.every_postgres` runs a test on the oldest supported PostgreSQL and on the newest; else the newest.
"""

import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, getsignal, signal

import psycopg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from pydantic import SecretStr
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.runtime.scrub import Known
from relay.testing.servers.postgres import PostgresServer, installed
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.given import given_postgres, given_rabbitmq
from tests.support.java import java_home
from tests.support.log import log_as_before
from tests.support.releases import NEWEST, OLDEST
from tests.support.template import template_of

# A busy machine may take its time for one example: no test here asserts how long anything takes. New examples are for
# work on the code; CI tells of the change alone.
hypothesis_settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
hypothesis_settings.register_profile("fuzz", hypothesis_settings.get_profile("patient"), max_examples=5000)
hypothesis_settings.load_profile("patient")

# Their tests take as long as ten others.
LONG = {"spark", "demo", "replay", "examples"}
SPARK = "tests/spark/"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"every_postgres: runs on PostgreSQL {OLDEST} and {NEWEST}")
    for ignored in (SIGINT, SIGTERM, SIGHUP):
        if getsignal(ignored) is SIG_IGN:  # behind `nohup`, or in a script's background
            # Processes would inherit that from us. What is handled here is at its default in them.
            signal(ignored, lambda *_: None)
    if home := java_home():
        os.environ["JAVA_HOME"] = str(home)  # Spark takes the first Java on PATH otherwise, which may be too new


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_postgres") and not given_postgres():
        metafunc.parametrize("postgres", [OLDEST, NEWEST], ids=["pg15", "pg18"], indirect=True, scope="session")


@pytest.hookimpl(trylast=True)  # behind the order by chance, and what is deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: at the end, one process would wait for the other's."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path] * (1 if LONG.isdisjoint(item.path.parts) else 10), reverse=True)


class OneSparkSession(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Put each file into one process, and all files of Spark into the same one: a session costs 20 seconds of CPU."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SPARK if file.startswith(SPARK) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneSparkSession | None:
    """Choose the scheduler of `make test`; whole jobs start a Java each, wherever they run."""
    is_of_files = config.getoption("dist") == "loadfile" and config.getoption("markexpr") != "jobs"
    return OneSparkSession(config, log) if is_of_files else None


@pytest.fixture(autouse=True)
def _forgotten_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide no password of one test in another test's output."""
    monkeypatch.setattr("relay.runtime.scrub._known", Known())


@pytest.fixture(autouse=True)
def _log_of_this_test() -> Iterator[None]:
    """Let no test log to what another one has set up."""
    with log_as_before():
        yield


@pytest.fixture(scope="session")
def postgres_of() -> Iterator[Callable[[int], PostgresServer]]:
    """Return this process's server of a version; started at the first call."""
    servers: dict[int, PostgresServer] = {}
    with ExitStack() as running:

        def server(version: int) -> PostgresServer:
            if version not in servers:
                servers[version] = running.enter_context(given_postgres() or PostgresServer(version))
            return servers[version]

        yield server


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest, postgres_of: Callable[[int], PostgresServer]) -> PostgresServer:
    """The server of this test; others use it too, so leave its settings alone."""
    version: int = getattr(request, "param", NEWEST)
    if version not in installed():
        pytest.skip(f"PostgreSQL {version} is not installed; as root, `tests/support/packages test` installs it")
    return postgres_of(version)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """This process's broker; other tests use it too, so stop a node of your own."""
    with given_rabbitmq() or RabbitServer(schedulers=1) as node:
        yield node


@pytest.fixture
def database_url(postgres: PostgresServer) -> Iterator[str]:
    """A fresh migrated database, as a libpq URL."""
    name = f"test_{secrets.token_hex(6)}"
    url = postgres.create_database(name, template=template_of(postgres))
    yield url
    postgres.drop_database(name)


@pytest.fixture
def database(database_url: str) -> DatabaseSettings:
    """A fresh migrated database."""
    return DatabaseSettings(url=SecretStr(database_url))


@pytest.fixture
async def stranger(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A session that stands in the way."""
    async with AsyncExitStack() as left:
        connection = await psycopg.AsyncConnection.connect(database_url, application_name="report")
        left.push_async_callback(connection.close)
        yield connection


@pytest.fixture
def inbox_url(postgres: PostgresServer, database_url: str) -> Iterator[str]:
    """A consumer's database, with an inbox."""
    name = f"inbox_{database_url[-12:]}"
    yield postgres.create_database(name, template=template_of(postgres))
    postgres.drop_database(name)


@pytest.fixture
def broker_url(rabbitmq: RabbitServer) -> Iterator[str]:
    """A fresh virtual host, as an AMQP URL."""
    name = f"test_{secrets.token_hex(6)}"
    yield rabbitmq.add_vhost(name)
    rabbitmq.delete_vhost(name)


@pytest.fixture
def broker(broker_url: str) -> BrokerSettings:
    """A fresh virtual host."""
    return BrokerSettings(url=SecretStr(broker_url))


@pytest.fixture
def settings(database: DatabaseSettings, broker: BrokerSettings) -> Settings:
    """Settings of a relay on this test's database and virtual host."""
    return Settings(database=database, broker=broker)
