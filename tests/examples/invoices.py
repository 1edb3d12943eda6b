"""What the drills of examples/invoices share: the worker, the issued invoices, and their projection."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage
from pydantic import SecretStr
from yarl import URL

from examples.invoices.worker import QUEUE
from relay.config.settings import Settings
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.faults.victim import Victim
from tests.http.site import Site
from tests.support.proxy import FaultProxy

EXAMPLE = Path("examples/invoices").resolve()
DEAD = f"{QUEUE}.dead"

TABLES = Path("examples/pipeline/billing.sql").resolve().read_text()
ISSUE = (EXAMPLE / "issue.sql").read_text()

# The downstream is the database: as slow as `billing.delay` says. It notices soon when a worker dies.
DOWNSTREAM = """
    CREATE TABLE billing.delay (invoices text, seconds float8);
    CREATE FUNCTION billing.wait() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(seconds) FROM billing.delay WHERE NEW.invoice_id LIKE invoices;
            RETURN NEW;
        END
    $$;
    CREATE TRIGGER wait BEFORE INSERT ON billing.invoice_projection FOR EACH ROW EXECUTE FUNCTION billing.wait();
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET client_connection_check_interval = 100', current_database());
    END $$;
"""

DIFFERENT = """
    SELECT count(*) FROM (
        (TABLE billing.invoice EXCEPT ALL TABLE billing.invoice_projection)
        UNION ALL
        (TABLE billing.invoice_projection EXCEPT ALL TABLE billing.invoice)
    ) AS different
"""
PROJECTED = "SELECT count(*) FROM billing.invoice_projection"
REMEMBERED = "SELECT count(*) FROM outbox.processed_message WHERE consumer_name = 'invoices'"
SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"
UNSENT = "SELECT count(*) FROM outbox.message WHERE state <> 'sent'"
WORKED_ON = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'outbox-consumer invoices' AND wait_event = 'PgSleep'
"""


class InvoiceExample:
    """The example on servers of a test, which reads results by its own connections."""

    def __init__(
        self,
        connection: psycopg.AsyncConnection,
        broker: AbstractConnection,
        rabbitmq: RabbitServer,
        settings: Settings,
        logs: Path,
    ) -> None:
        self.connection = connection
        self.broker = broker
        self.settings = settings
        self._rabbitmq = rabbitmq
        self.site = Site(f"127.0.0.1:{free_port()}")  # of the worker
        self._logs = logs
        self._hired: Victim | None = None

    @property
    def vhost(self) -> str:
        return URL(self.settings.broker.url.get_secret_value()).path.removeprefix("/")

    def hire(
        self, *, concurrency: int = 4, broker: FaultProxy | None = None, database: FaultProxy | None = None
    ) -> Victim:
        """Return the worker, not started yet, which connects through these proxies."""
        environment = {
            **os.environ,
            "RELAY_DATABASE_URL": _through(self.settings.database.url, database),
            "RELAY_BROKER_URL": _through(self.settings.broker.url, broker),
            "RELAY_HTTP_LISTEN": self.site.address,
            "RELAY_LOG_FORMAT": "json",
        }
        command = [sys.executable, "-m", "examples.invoices.worker", "--concurrency", str(concurrency)]
        self._hired = Victim("worker", command, environment, "consumer.ready", self._logs)
        return self._hired

    def leave(self) -> None:
        """Leave nothing running."""
        if self._hired is not None:
            self._hired.stop(signal.SIGKILL)

    async def issue(self, hundreds: int = 1) -> None:
        for _ in range(hundreds):
            await self.connection.execute(ISSUE)

    async def some_invoice(self) -> str:
        row = await (await self.connection.execute("SELECT min(invoice_id) FROM billing.invoice")).fetchone()
        assert row is not None
        return str(row[0])

    async def slow_down(self, seconds: float, invoices: str = "%") -> None:
        """Let the downstream take `seconds` for each invoice whose id is LIKE this."""
        await self.connection.execute("INSERT INTO billing.delay VALUES (%s, %s)", [invoices, seconds])

    async def speed_up(self) -> None:
        await self.connection.execute("DELETE FROM billing.delay")

    async def is_settled(self) -> bool:
        """Whether each invoice took effect once, and is in the inbox."""
        issued = await self.count("SELECT count(*) FROM billing.invoice")
        return not await self.count(DIFFERENT) and await self.count(REMEMBERED) == issued

    async def count(self, statement: LiteralString) -> int:
        row = await (await self.connection.execute(statement)).fetchone()
        assert row is not None
        return int(row[0])

    async def ready(self, queue: str = QUEUE) -> int:
        """Return how many messages wait in a queue."""
        async with self.broker.channel() as channel:
            declared = await channel.declare_queue(queue, passive=True)
        return declared.declaration_result.message_count or 0

    async def dead_letter(self) -> AbstractIncomingMessage:
        async with self.broker.channel() as channel:
            letter = await (await channel.get_queue(DEAD)).get(no_ack=True)
        assert letter is not None
        return letter

    def unacknowledged(self) -> int:
        """Return how many messages the worker holds, read from the queue: the broker's list is seconds old."""
        held = "fun rabbit_fifo:query_messages_checked_out/1"
        return int(
            self._rabbitmq.call(
                f"{{ok, {{_, Held}}, _}} = ra:local_query({{'{self.vhost}_{QUEUE}', node()}}, {held}), Held."
            )
        )

    async def is_drained(self) -> bool:
        """Whether neither the queue nor the worker has a message."""
        return not await self.ready() and not self.unacknowledged()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name that the workers have logged."""
        lines = [line for log in sorted(self._logs.glob("worker-*.log")) for line in log.read_text().splitlines()]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    async def metric(self, name: str, **labels: str) -> float | None:
        """Return the current value of the worker's metric `outbox_consumer_<name>`."""
        return await self.site.value(f"outbox_consumer_{name}", consumer="invoices", queue=QUEUE, **labels)

    def counters(self) -> dict[str, Any]:
        """Return the counters of the worker that was stopped last."""
        return self.events("consumer.stopped")[-1]


def _through(url: SecretStr, proxy: FaultProxy | None) -> str:
    given = url.get_secret_value()
    return given if proxy is None else str(URL(given).with_port(proxy.port))


def proxy_to(url: SecretStr, *, amqp: bool) -> FaultProxy:
    """Return a proxy in front of this server."""
    target = URL(url.get_secret_value())
    assert target.host is not None
    assert target.port is not None
    return FaultProxy(target.host, target.port, amqp=amqp)
