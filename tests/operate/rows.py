"""Rows as a writer, a relay or a crash leaves them, by SQL: these tests need no relay."""

from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

LANES = list(range(16))


class Rows:
    """Writes rows into one database's outbox."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def pending(self, key: str | None = "1", **columns: Any) -> int:
        """Insert a row and give its id."""
        values = {
            "aggregate_type": "invoice",
            "aggregate_id": key,
            "event_type": "InvoiceIssued",
            "payload": Jsonb({"key": key}),
            **columns,
        }
        statement = sql.SQL("INSERT INTO outbox.message ({}) VALUES ({}) RETURNING id").format(
            sql.SQL(", ").join(map(sql.Identifier, values)), sql.SQL(", ").join(map(sql.Placeholder, values))
        )
        row = self.connection.execute(statement, values).fetchone()
        assert row is not None
        return int(row[0])

    def parked(self, key: str | None = "1", *, behind: int | None = None, **columns: Any) -> int:
        """Insert a row and park it as a relay does; `behind` another one, or at the head of its key."""
        row = self.pending(key, **columns)
        error = f"waits behind message {behind}" if behind else "returned: no queue is bound"
        self.connection.execute(
            "UPDATE outbox.message SET state = 'parked', parked_at = now(), attempts = %s, last_error = %s,"
            " held_behind = %s WHERE id = %s",
            [0 if behind else 8, error, behind, row],
        )
        return row

    def quarantined(self, routing_key: str, key: str | None = "1", *, exchange: str = "") -> int:
        """Insert a row and put its route in quarantine as a relay does, since New Year."""
        row = self.pending(key, exchange=exchange, routing_key=routing_key)
        self.connection.execute(
            "INSERT INTO outbox.quarantine (exchange, routing_key, reason, since)"
            " VALUES (%s, %s, '312 NO_ROUTE', '2026-01-01T00:00:00Z') ON CONFLICT DO NOTHING",
            [exchange, routing_key],
        )
        self.connection.execute(
            "UPDATE outbox.message SET state = 'quarantined',"
            " quarantine = (SELECT id FROM outbox.quarantine WHERE (exchange, routing_key) = (%s, %s)) WHERE id = %s",
            [exchange, routing_key, row],
        )
        return row

    def probe(self, row: int) -> None:
        """Let a row in quarantine go out as the probe of its route, as a relay does."""
        self.connection.execute(
            "WITH noted AS (UPDATE outbox.quarantine SET probes = probes + 1, probed_at = now())"
            " UPDATE outbox.message SET state = 'pending', available_at = now() WHERE id = %s",
            [row],
        )

    def node(self, name: str = "relay-1", *, age: float = 0, **columns: Any) -> None:
        """Write a relay's heartbeat, `age` seconds old; our session has the lock that the relay's would have."""
        values = {"name": name, "backend_pid": 1, "lanes": LANES, "version": "0.1.0", **columns}
        statement = sql.SQL(
            "INSERT INTO outbox.node (heartbeat_at, {}) VALUES (now() - %(age)s * interval '1 second', {})"
        ).format(sql.SQL(", ").join(map(sql.Identifier, values)), sql.SQL(", ").join(map(sql.Placeholder, values)))
        self.connection.execute(statement, {**values, "age": age})
        self.connection.execute("SELECT pg_try_advisory_lock(hashtext('outbox.node'), hashtext(%s))", [name])

    def states(self) -> dict[int, tuple[str, int | None]]:
        """Return state and held_behind of every row by id."""
        rows = self.connection.execute("SELECT id, state, held_behind FROM outbox.message ORDER BY id")
        return {row: (state, behind) for row, state, behind in rows}
