"""What a request is told from others by, and what was answered to it: a repeat changes nothing, and is answered alike.

A program chooses the key of a request (api/once.py), and a page that of each of its forms (forms.py). What a request
did commits together with its answer.
"""

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL

from relay.servers.postgres.tables import Tables

FORGET = SQL("DELETE FROM {schema}.api_answer WHERE begun_at < now() - interval '1 day'")
# Of two that come at the same time, the second waits for the end of the first one's transaction.
CLAIM = SQL("""
    INSERT INTO {schema}.api_answer (done_by, key, request) VALUES (%(by)s, %(key)s, %(request)s)
    ON CONFLICT (done_by, key) DO NOTHING
""")
READ = SQL("SELECT request, status, body FROM {schema}.api_answer WHERE done_by = %(by)s AND key = %(key)s")
KEEP = SQL(
    "UPDATE {schema}.api_answer SET status = %(status)s, body = %(body)s WHERE done_by = %(by)s AND key = %(key)s"
)
GIVE_UP = SQL("DELETE FROM {schema}.api_answer WHERE done_by = %(by)s AND key = %(key)s AND status IS NULL")


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of an earlier request with the same key.

    Attributes:
        is_same: it asked for the same.
        status: None: it has no answer yet, or its console has died over it.
    """

    is_same: bool
    status: int | None
    body: bytes


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request that changes something.

    Attributes:
        digest: of all that it asks for.
    """

    key: str
    digest: bytes

    def claim(self, tables: Tables, by: str) -> Kept | None:
        """Take the key; return what is known when an earlier request has it."""
        self._run(tables, FORGET, by)
        if self._run(tables, CLAIM, by).rowcount:
            return None
        request, status, body = self._run(tables, READ, by).fetchone() or (None, None, None)
        return Kept(request == self.digest, status, body or b"")

    def keep(self, tables: Tables, by: str, *, status: int, body: bytes) -> None:
        """Keep the answer."""
        self._run(tables, KEEP, by, status=status, body=body)

    def give_up(self, tables: Tables, by: str) -> None:
        """Let the key go: nothing was done."""
        self._run(tables, GIVE_UP, by)

    def _run(self, tables: Tables, statement: SQL, by: str, **more: Any) -> psycopg.Cursor[Any]:
        values = {"by": by, "key": self.key, "request": self.digest, **more}
        return tables.execute(statement, values)
