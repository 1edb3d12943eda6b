"""The roles of config/roles.sql: granted for a test, taken on by a session, and tried."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg

SCRIPT = (Path(__file__).parents[2] / "config" / "roles.sql").read_text()
NAMES: tuple[LiteralString, ...] = (
    "outbox_writer",
    "outbox_publisher",
    "outbox_spark",
    "outbox_relay",
    "outbox_retention",
    "outbox_archive",
    "outbox_consumer",
    "outbox_console",
)


@contextmanager
def granted_roles(connection: psycopg.Connection[Any], *logins: str) -> Iterator[None]:
    """Run config/roles.sql; at the end drop its roles, and the logins that the test has made."""
    connection.execute(SCRIPT.encode())
    try:
        yield
    finally:
        names = ", ".join((*logins, *NAMES))
        connection.execute(f"RESET ROLE; DROP OWNED BY {names}; DROP ROLE {names}".encode())


@contextmanager
def role(connection: psycopg.Connection[Any], name: LiteralString) -> Iterator[psycopg.Connection[Any]]:
    """Yield the connection, which acts as this role until the end of the block."""
    connection.execute("SET ROLE " + name)
    yield connection
    connection.execute("RESET ROLE")


def allowed(connection: psycopg.Connection[Any], name: LiteralString, statements: list[LiteralString]) -> list[str]:
    """Return the statements that this role may execute. Each of them is rolled back."""
    done: list[str] = []
    with role(connection, name):
        for statement in statements:
            try:
                with connection.transaction(force_rollback=True):
                    connection.execute(statement)
            except psycopg.errors.InsufficientPrivilege:
                continue
            done.append(statement)
    return done
