"""Each migration names in its docstring the locks that it takes, and takes no other."""

import re
from collections.abc import Collection

import psycopg
import pytest
import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from relay.servers.postgres.compatibility import SCRIPTS
from tests.migrations.conftest import url_of

MODES = ("ACCESS EXCLUSIVE", "SHARE ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE")  # what relays or writers wait for
CLAUSE = re.compile(f"({'|'.join(MODES)}) on ([^.;]*)")
MIGRATIONS = {script.revision: script for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}

# Another session does not see the tables that the migration makes.
LOCKS = """
    SELECT regexp_replace(upper(regexp_replace(mode, '([a-z])([A-Z])', '\\1 \\2', 'g')), ' LOCK$', ''),
        relname, coalesce(pg_partition_root(relation), relation)::regclass::text
    FROM pg_locks
    JOIN pg_class ON pg_class.oid = relation
    WHERE pid = %s AND granted AND relnamespace = to_regnamespace('outbox') AND relkind IN ('r', 'p', 'v')
        AND mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock') AND relname <> 'migration'
"""
KNOWN = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('outbox')"
ROWS = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload) SELECT 'a', 'e', '1' FROM generate_series(1, 100);
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, parked_at, last_error)
        SELECT 'a', 'e', '1', 'parked', now(), 'refused for ' || n FROM generate_series(1, 100) AS n
"""


@pytest.mark.parametrize("revision", sorted(MIGRATIONS))
def test_a_migration_takes_the_locks_that_its_text_names(
    empty_database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    """Another session looks at the locks when all is done and nothing is committed: locks are held until the end."""
    script, url = MIGRATIONS[revision], url_of(empty_database)
    if script.down_revision:
        migrate(empty_database, str(script.down_revision))
        with psycopg.connect(url) as writer:
            writer.execute(ROWS)
    taken: dict[str, str] = {}
    known: set[str] = set()

    def look(_: ScriptDirectory, /, *, ctx: MigrationContext, **__: object) -> None:
        assert ctx.connection is not None
        pid = ctx.connection.execute(sa.text("SELECT pg_backend_pid()")).scalar()
        with psycopg.connect(url, options="-c search_path=outbox") as observer:
            locks = observer.execute(LOCKS, [pid]).fetchall()
            of_tables = strongest([(mode, table) for mode, table, _ in locks])
            roots = {table: root for _, table, root in locks}
            # A partition is named if its lock is not that of its table.
            taken.update({t: mode for t, mode in of_tables.items() if roots[t] == t or of_tables.get(roots[t]) != mode})
            known.update(name for (name,) in observer.execute(KNOWN).fetchall())

    monkeypatch.setattr("relay.operate.schema.migrate.note_oldest_release", look)
    migrate(empty_database, revision)

    assert taken == strongest(named(script.module.__doc__ or "", known))


def named(text: str, known: set[str]) -> list[tuple[str, str]]:
    """Return the locks that a docstring names: "ACCESS EXCLUSIVE on node, and on batch while it is read"."""
    lock = " ".join(text.partition("Lock:")[2].split())
    return [
        (mode, table)
        for mode, tables in CLAUSE.findall(lock)
        for table in re.findall(r"[a-z_]+", tables)
        if table in known
    ]


def strongest(locks: Collection[tuple[str, str]]) -> dict[str, str]:
    """Return the strongest lock of each table; one on rows that are written too is as good as no lock."""
    return {table: mode for mode in reversed(MODES) for taken, table in locks if taken == mode}
