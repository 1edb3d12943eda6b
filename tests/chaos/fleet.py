"""A fleet of relays: both servers, three relays behind proxies, writers, and the history of all that happens."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import aio_pika
import psycopg
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.faults.billing import Writers
from tests.faults.history import History
from tests.faults.recorder import Recorder
from tests.faults.victim import Victim
from tests.faults.watch import looked_at, watched
from tests.support.proxy import FaultProxy
from tests.support.queues import declare_bound, keep_queues

WITNESS = "witness"  # the queue that gets everything
NAMES = ("relay-1", "relay-2", "relay-3")
READY = "/readyz?standby=ok"  # while the others have all lanes, nothing is wrong with it
PAUSE = 0.15  # seconds between two transactions of a writer: some 150 messages a second
MAX_MESSAGE_BYTES = 65536  # a larger one is poison

# Faults come in seconds, so what comes after them must not take minutes.
IMPATIENT = {
    "RELAY_MAX_MESSAGE_BYTES": str(MAX_MESSAGE_BYTES),
    "RELAY_MAX_ATTEMPTS": "3",
    "RELAY_BACKOFF_INITIAL": "0.2",
    "RELAY_LOG_FORMAT": "json",
}


@dataclass(frozen=True, slots=True)
class FleetServers:
    """Private servers, with a migrated database and the queue."""

    postgres: PostgresServer
    rabbitmq: RabbitServer
    database_url: str
    broker_url: str


@dataclass(frozen=True, slots=True)
class FleetRelay:
    """A relay's process, and its proxies to the broker and to the database."""

    victim: Victim
    broker: Recorder
    database: FaultProxy
    http: str

    @property
    def name(self) -> str:
        return self.victim.name

    def pid(self) -> int | None:
        return self.victim.pid if self.victim.is_running() else None


@dataclass
class Fleet:
    """Everything that a fault can reach.

    Attributes:
        injected: how often each kind of fault was carried out.
        complaints: what is wrong but no invariant of the checker, such as a relay that did not drain.
    """

    servers: FleetServers
    relays: dict[str, FleetRelay]
    writers: Writers
    history: History
    injected: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def overtaken(self) -> list[str]:
        """Return what the relays have logged of rows that only a sweep found."""
        logs = (log for relay in self.relays.values() for log in relay.victim.logs.glob("*.log"))
        lines = (line for log in sorted(set(logs)) for line in log.read_text().splitlines())
        return [line for line in lines if "rows.overtaken" in line]

    async def connect(self) -> psycopg.AsyncConnection:
        """Open a session that passes no proxy."""
        return await psycopg.AsyncConnection.connect(self.servers.database_url, autocommit=True)


@contextmanager
def private_servers() -> Iterator[FleetServers]:
    """Yield two private servers, which end with the block."""
    with (
        PostgresServer(settings={"max_prepared_transactions": "20"}) as postgres,
        RabbitServer(schedulers=1) as rabbitmq,
    ):
        database_url = postgres.create_database("chaos")
        migrate(DatabaseSettings(url=SecretStr(database_url)))
        yield FleetServers(postgres, rabbitmq, database_url, rabbitmq.add_vhost("chaos"))


@asynccontextmanager
async def running_fleet(
    servers: FleetServers, seed: int, logs: Path, *, names: Sequence[str] = NAMES, **variables: str
) -> AsyncIterator[Fleet]:
    """Yield relays that run and are watched; the writers have not started.

    `variables`: added to the relays' environment.
    """
    history: History = []
    # None that is large: its rows go out key by key for seconds, which would hide whether the rate has come back.
    writers = Writers(servers.database_url, seed, history, pause=PAUSE, large=0.0)
    await writers.prepare()
    async with await aio_pika.connect(servers.broker_url) as connection:
        await declare_bound(await connection.channel(), WITNESS)
    keep_queues(servers.rabbitmq)
    async with AsyncExitStack() as watching:
        with ExitStack() as killing:
            fleet = Fleet(servers, {}, writers, history)
            await watching.enter_async_context(looked_at(history, servers.database_url))
            for name in names:
                relay = fleet.relays[name] = await _relay(watching, fleet, name, logs, variables)
                killing.callback(relay.victim.stop, SIGKILL)
                await relay.victim.start()
                watch = watched(history, servers.database_url, http=relay.http, pid=relay.pid, relay=name, path=READY)
                await watching.enter_async_context(watch)
            yield fleet


async def _relay(
    proxies: AsyncExitStack, fleet: Fleet, name: str, logs: Path, variables: Mapping[str, str]
) -> FleetRelay:
    servers, broker_url = fleet.servers, URL(fleet.servers.broker_url)
    recorder = Recorder(fleet.history, "127.0.0.1", servers.rabbitmq.port, relay=name)
    broker = await proxies.enter_async_context(recorder)
    database = await proxies.enter_async_context(FaultProxy("127.0.0.1", servers.postgres.port, amqp=False))
    http = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        **IMPATIENT,
        "RELAY_DATABASE_URL": servers.database_url.replace(f":{servers.postgres.port}/", f":{database.port}/"),
        "RELAY_BROKER_URL": str(broker_url.with_port(broker.port)),
        "RELAY_NODE": name,
        "RELAY_HTTP_LISTEN": http,
        **variables,
    }
    command: list[str | Path] = [Path(sys.executable).parent / "relay", "run"]
    # Not `relay.ready`: it may be started while a server is unreachable.
    return FleetRelay(Victim(name, command, environment, "http.listening", logs), broker, database, http)
