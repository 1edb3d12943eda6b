"""Servers that already run, used in place of private ones, so that the tests can run on other releases.

TEST_POSTGRES_URL is a superuser's URL of a server on 127.0.0.1. TEST_RABBITMQ_URL is the URL of the administrator
`relay`. TEST_RABBITMQ_SHELL runs a command on the broker's machine, such as `docker exec --interactive NAME`.
"""

import os
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import run
from relay.testing.servers.rabbitmq import RabbitServer

ERL_CALL = 'erl_call -address 127.0.0.1:25672 -c "$(cat ~/.erlang.cookie)" -timeout 30 -e'


class GivenPostgres(PostgresServer):
    """A PostgreSQL that the tests neither start nor stop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = urlsplit(url)

    def variables(self) -> dict[str, str]:
        """Return the variables that make another run of the tests use this server."""
        return {"TEST_POSTGRES_URL": self._url.geturl()}

    def start(self) -> None:
        self.port, self._password = self._url.port or 5432, self._url.password or ""

    def _prepare(self, folder: Path) -> None:
        pass


class GivenRabbit(RabbitServer):
    """A RabbitMQ that the tests neither start nor stop."""

    def __init__(self, url: str, shell: str) -> None:
        super().__init__()
        self._url = urlsplit(url)
        self._shell = shlex.split(shell)

    def variables(self) -> dict[str, str]:
        """Return the variables that make another run of the tests use this server."""
        return {"TEST_RABBITMQ_URL": self._url.geturl(), "TEST_RABBITMQ_SHELL": shlex.join(self._shell)}

    def start(self) -> None:
        self.port, self._password = self._url.port or 5672, self._url.password or ""

    def ctl(self, *arguments: str) -> str:
        return run([*self._shell, "rabbitmqctl", "-q", *arguments])

    def _erl_call(self, expressions: str) -> str:
        return run([*self._shell, "sh", "-c", ERL_CALL], stdin=expressions)

    def _prepare(self, folder: Path) -> None:
        pass


def given_postgres() -> PostgresServer | None:
    url = os.environ.get("TEST_POSTGRES_URL")
    return GivenPostgres(url) if url else None


def given_rabbitmq() -> RabbitServer | None:
    url = os.environ.get("TEST_RABBITMQ_URL")
    return GivenRabbit(url, os.environ["TEST_RABBITMQ_SHELL"]) if url else None
