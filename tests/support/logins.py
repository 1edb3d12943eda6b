"""Logins whose passwords change, and the files that hold their URLs."""

import secrets
from abc import ABC, abstractmethod
from pathlib import Path

import psycopg
from psycopg import sql

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer


class Login(ABC):
    """A user of one server; `file` holds the URL with the password."""

    end: str

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"{self.end}-url"
        self.name = f"rotated_{secrets.token_hex(4)}"
        self.password = secrets.token_hex(12)

    def change(self) -> None:
        """Set another password and end the connections. The file keeps the old password."""
        self.password = secrets.token_hex(12)
        self._change()

    def renew(self) -> None:
        """Write the URL with the current password into the file."""
        self.file.write_text(f"{self.url}\n")

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def _change(self) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...


class DatabaseLogin(Login):
    """A superuser of the database."""

    end = "database"

    def __init__(self, server: PostgresServer, database_url: str, folder: Path) -> None:
        super().__init__(folder)
        self._server = server
        self._database = database_url.rpartition("/")[2]
        self._run("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}", self.name, self.password)
        self.renew()

    @property
    def url(self) -> str:
        return self._server.url(self._database, user=self.name, password=self.password)

    def _change(self) -> None:
        self._run("ALTER ROLE {} PASSWORD {}", self.name, self.password)
        self._end_sessions()

    def drop(self) -> None:
        self._end_sessions()
        self._run("DROP ROLE {}", self.name)

    def _end_sessions(self) -> None:
        with psycopg.connect(self._server.admin_url, autocommit=True) as connection:
            statement = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s"
            connection.execute(statement, [self.name])

    def _run(self, statement: str, name: str, *values: str) -> None:
        with psycopg.connect(self._server.admin_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name), *map(sql.Literal, values)))


class BrokerLogin(Login):
    """A user with all permissions in the test's virtual host."""

    end = "broker"

    def __init__(self, server: RabbitServer, broker_url: str, folder: Path) -> None:
        super().__init__(folder)
        self._server = server
        self._vhost = broker_url.rpartition("/")[2]
        self._call("add_user", self.password)
        self._server.call(
            f'rabbit_auth_backend_internal:set_permissions(<<"{self.name}">>, <<"{self._vhost}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )
        self.renew()

    @property
    def url(self) -> str:
        return f"amqp://{self.name}:{self.password}@{self._server.address}:{self._server.port}/{self._vhost}"

    def _change(self) -> None:
        self._call("change_password", self.password)
        self._server.call(f'rabbit_networking:close_all_user_connections(<<"{self.name}">>, "the drill").')

    def drop(self) -> None:
        self._call("delete_user")

    def _call(self, function: str, *values: str) -> None:
        arguments = ", ".join(f'<<"{value}">>' for value in (self.name, *values, "tests"))
        self._server.call(f"rabbit_auth_backend_internal:{function}({arguments}).")
