"""A relay and a dashboard whose roles were made before a migration, and have what was granted then."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg.sql import SQL, Identifier

from tests.migrations.conftest import Connection

RIGHTS = """
    SELECT array_agg(right_on ORDER BY right_on)
    FROM unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS named (right_on)
    WHERE has_table_privilege(%s, %s, right_on)
"""


@dataclass(frozen=True, slots=True)
class EarlierRoles:
    """The names of both roles."""

    connection: Connection
    relay: str
    dashboard: str

    def rights_on(self, table: str) -> list[object]:
        """Return what the relay, then the dashboard may do with a table: an array of words each."""
        found = (self.connection.execute(RIGHTS, [role, table]).fetchone() for role in (self.relay, self.dashboard))
        return [rights for row in found if row for rights in row]

    def become_relay(self) -> None:
        self.connection.execute(SQL("SET ROLE {}").format(Identifier(self.relay)))


@contextmanager
def earlier_roles(connection: Connection, grants: str) -> Iterator[EarlierRoles]:
    """Yield the roles, with these grants to `{relay}` and `{dashboard}`; both are gone afterwards."""
    made = EarlierRoles(connection, *(f"{name} {secrets.token_hex(6)}" for name in ("Relay", "dashboard")))
    names = {"relay": Identifier(made.relay), "dashboard": Identifier(made.dashboard)}
    opening = "CREATE ROLE {relay}; CREATE ROLE {dashboard}; GRANT USAGE ON SCHEMA outbox TO {relay}, {dashboard};"
    connection.execute(SQL(opening + grants).format(**names))
    try:
        yield made
    finally:
        ending = "RESET ROLE; DROP OWNED BY {relay}, {dashboard}; DROP ROLE {relay}, {dashboard}"
        connection.execute(SQL(ending).format(**names))
