"""The private servers of a benchmark: PostgreSQL as durable as in production, RabbitMQ, the tables and the queue."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
from psycopg.sql import SQL, Identifier
from pydantic import SecretStr

from bench.frame.error import BenchmarkError
from bench.frame.processes import CpuMeter, wait_idle
from bench.frame.queue import bind_queue
from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer

FILL_WAL = """
    SELECT count(pg_logical_emit_message(false, '', repeat(md5(n::text), 1 << 15))) FROM generate_series(1, %s) AS n
"""
LOOK_AT_ALL = "SELECT count(*) FROM outbox.message"
WAL_MEGABYTES = 2048  # more than a round writes; the checkpoint before the next recycles them


@dataclass(frozen=True, slots=True)
class Servers:
    """Where they are, whom to account CPU time to, and a folder for what the benchmark makes."""

    database_url: str
    postgres_pid: int
    broker_url: str
    rabbitmq_pid: int
    folder: Path

    @property
    def urls(self) -> tuple[str, str]:
        return self.database_url, self.broker_url

    def rest(self, *pids: int) -> None:
        """Wait until both servers and further processes are idle."""
        wait_idle(self.postgres_pid, self.rabbitmq_pid, *pids)

    def cpu(self, **roots: Sequence[int]) -> CpuMeter:
        """Return a meter of both servers and of further processes."""
        return CpuMeter(**roots, postgres=[self.postgres_pid], rabbitmq=[self.rabbitmq_pid])


class HasStatus(Protocol):
    def status(self, text: str, /) -> AbstractContextManager[Any]: ...


@contextmanager
def private_servers(run: HasStatus, *, routing_key: str) -> Iterator[Servers]:
    """Start both, with the outbox tables and a bound quorum queue; stop them and remove everything at the end."""
    with (
        run.status("starting PostgreSQL and RabbitMQ"),
        temporary_folder() as folder,
        PostgresServer(durable=True) as postgres,
        RabbitServer(durable=True) as rabbitmq,
    ):
        database_url = new_database(postgres)
        make_wal_files(database_url)
        bind_queue(rabbitmq.url(), routing_key)
        yield Servers(database_url, postgres.pid, rabbitmq.url(), rabbitmq.pid, folder)


@contextmanager
def private_postgres(run: HasStatus) -> Iterator[tuple[int, str]]:
    """Start PostgreSQL alone with the outbox tables; hand over its process id and the URL."""
    with run.status("starting PostgreSQL"), PostgresServer(durable=True) as postgres:
        yield postgres.pid, new_database(postgres)


def new_database(postgres: PostgresServer, name: str = "bench") -> str:
    """Make a database with the outbox tables, and return its URL."""
    url = postgres.create_database(name)
    migrate(DatabaseSettings(url=SecretStr(url)))
    return url


def make_wal_files(database_url: str) -> None:
    """Leave the server with the WAL files of one that has long been running: recycled ones, ready to be written to.

    A new server makes each file when it is needed, and every commit waits meanwhile: 50 to 90 ms in each 16 MB.
    """
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(FILL_WAL, [WAL_MEGABYTES])
        connection.execute("CHECKPOINT")


@contextmanager
def second_database(servers: Servers, name: str) -> Iterator[Servers]:
    """Make a further database with the outbox tables on the same server; it is dropped at the end."""
    database_url = urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        try:
            migrate(DatabaseSettings(url=SecretStr(database_url)))
            yield replace(servers, database_url=database_url)
        finally:
            connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


@contextmanager
def holding_snapshot(database_url: str) -> Iterator[None]:
    """Hold a snapshot that has read, as a long report or a dump does."""
    with psycopg.connect(database_url, application_name="old snapshot") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute(LOOK_AT_ALL)
        yield
        connection.rollback()


def require_space(folder: Path, needed: int) -> None:
    """Make sure of room on the disk.

    Raises:
        BenchmarkError: there is less.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BenchmarkError(
            f"{free / 2**30:.0f} GiB are free, and this takes up to {needed / 2**30:.0f}: ask for fewer rows"
        )
