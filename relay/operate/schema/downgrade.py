"""What going back to an earlier version of the tables would cost: the rows that go, and the relays that still run."""

from dataclasses import dataclass

from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.errors import BusyError
from relay.operate.schema.migrate import current_revision, dropped_tables
from relay.operate.session import limit_statements, open_tables
from relay.servers.postgres.tables import Tables

STATES = ("pending", "parked", "quarantined", "discarded", "archived", "sent")
COUNT_STATES = SQL("SELECT state, count(*) FROM {schema}.message GROUP BY state")
COUNT = SQL("SELECT count(*) FROM {schema}.{table}")

# By the session: a relay that was stopped a moment ago is gone, and one that hangs is not. In a restored database the
# process id may be that of another session, which began after the heartbeat.
READ_RUNNING = SQL("""
    SELECT name FROM {schema}.node
    JOIN pg_stat_activity ON pid = backend_pid AND datname = current_database() AND backend_start <= heartbeat_at
    ORDER BY name
""")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a downgrade would take away, counted at one moment."""

    rows: list[tuple[str, str, int]]  # table, state of its rows or an empty string, how many
    relays: list[str]  # that run on the tables

    @property
    def total(self) -> int:
        return sum(count for _, _, count in self.rows)

    def refuse_running(self) -> None:
        """Check that no relay runs on the tables.

        Raises:
            BusyError: one does.
        """
        if self.relays:
            raise BusyError(
                f"these relays run on the tables: {', '.join(self.relays)}; nothing was done: stop them first,"
                " or downgrade under them with --force"
            )


def preview(database: DatabaseSettings, revision: str) -> Cost:
    """Count every row that `downgrade` to `revision` would drop; changes nothing.

    Raises:
        DatabaseUnavailableError, AccessError: the rows cannot be counted.
        SchemaError, UsageError: as `downgrade`.
    """
    found = current_revision(database)
    dropped = dropped_tables(found, revision)
    with open_tables(database) as tables:
        limit_statements(tables.connection, 0)  # it counts for as long as it takes
        with tables.transaction():
            tables.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            rows = [row for table in dropped for row in _count(tables, table)]
            relays = [name for (name,) in tables.execute(READ_RUNNING)] if found else []
    return Cost(rows, relays)


def _count(tables: Tables, table: str) -> list[tuple[str, str, int]]:
    if table != "message":
        return [(table, "", count) for (count,) in tables.execute(COUNT, table=Identifier(table))]
    counts: dict[str, int] = dict(tables.execute(COUNT_STATES).fetchall())
    return [(table, state, counts.get(state, 0)) for state in STATES]
