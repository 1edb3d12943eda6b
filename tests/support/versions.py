"""The table of docs/versions.md: what the tests of each command run on."""

from pathlib import Path
from typing import NamedTuple

import psycopg

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer

TABLE = Path(__file__).parents[2] / "docs" / "versions.md"


class Versions(NamedTuple):
    """A row of the table; empty where the command uses no such thing."""

    python: str
    postgresql: str = ""
    rabbitmq: str = ""
    pyspark: str = ""


def documented() -> dict[str, Versions]:
    """Return the rows by their command."""
    rows = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `make")]
    return {command.strip(): Versions(*(cell.strip() for cell in cells)) for command, *cells in rows}


def postgres_version(server: PostgresServer) -> int:
    """Return the server's major version."""
    with psycopg.connect(server.admin_url) as connection:
        return connection.info.server_version // 10_000


def two_numbers(version: str) -> str:
    """Return the first two numbers of a version: "4.3" of "4.3.6"."""
    return ".".join(version.strip().split(".")[:2])


def rabbitmq_version(node: RabbitServer) -> str:
    """Return the first two numbers of the broker's version."""
    return two_numbers(node.ctl("version"))
