"""Tables that a newer release has migrated, used by this one: served in its range, refused beyond it."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from alembic.script import ScriptDirectory

import relay as product
from relay.config.settings import DatabaseSettings
from relay.engine.session.session import prepare
from relay.errors import SchemaError
from relay.operate.schema import migrate as operate
from relay.operate.schema.migrate import current_revision, downgrade, dropped_tables, migrate
from relay.servers.postgres import compatibility
from relay.servers.postgres.compatibility import SCRIPTS, head_revision, release_needed
from relay.servers.postgres.database import connect_async
from tests.cli.command import Command
from tests.migrations.catalog import description
from tests.support.revision import is_at_head

NEXT = f"{int(head_revision()) + 1:04}"
NEWER = "99.2.0"
SCRIPT = '''
"""Add a table."""

from alembic import op

revision = "{revision}"
down_revision = "{below}"
branch_labels = None
depends_on = None
oldest_release = "{oldest}"
drops = ("extra",)


def upgrade(schema: str) -> None:
    op.execute(f"CREATE TABLE {{schema}}.extra ()")


def downgrade(schema: str) -> None:
    op.execute(f"DROP TABLE {{schema}}.extra")
'''
TABLES = """
    SELECT array_agg(relname::text) FROM pg_class
    WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
"""


@contextmanager
def newer_release(folder: Path, oldest: str) -> Iterator[None]:
    """Be a release with one more migration, whose tables need the release `oldest`."""
    scripts = folder / "migrations"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    script = SCRIPT.format(revision=NEXT, below=head_revision(), oldest=oldest)
    (scripts / "versions" / f"{NEXT}_extra.py").write_text(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operate, "SCRIPTS", scripts)
        patch.setattr(compatibility, "SCRIPTS", scripts)
        patch.setattr(product, "__version__", NEWER)
        yield


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, RELAY_DATABASE_URL=database_url)


def serve(database: DatabaseSettings) -> None:
    """Begin as `relay run` does."""

    async def begin() -> None:
        async with await connect_async(database) as connection:
            await prepare(connection, database)

    asyncio.run(begin())


def test_tables_that_are_ahead_are_left_alone_and_served_in_the_range_that_they_name(
    database: DatabaseSettings, relay: Command, tmp_path: Path
) -> None:
    with newer_release(tmp_path, oldest=product.__version__):
        migrate(database)
    before = description(database.url.get_secret_value())

    migrated, checked, told = relay("migrate"), relay("migrate", "--check"), relay("status")
    serve(database)

    assert (migrated.code, checked.code) == (0, 0)
    assert migrated.out == checked.out == f"schema outbox is of version {NEXT}\n"
    assert migrated.err.startswith("database ")
    assert migrated.err.partition("\n")[2] == (
        f"schema outbox is of version {NEXT}, ahead of this release's {head_revision()};"
        f" release {product.__version__} runs on it, and there is nothing to do\n"
    )
    assert told.err == ""
    assert description(database.url.get_secret_value()) == before


def test_tables_beyond_the_range_are_refused_with_the_release_that_they_need(
    database: DatabaseSettings, relay: Command, tmp_path: Path
) -> None:
    with newer_release(tmp_path, oldest="99.1.0"):
        migrate(database)
        serve(database)

    for arguments in (["migrate"], ["migrate", "--check"], ["status"]):
        refused = relay(*arguments)

        assert (refused.code, refused.out) == (1, "")
        assert f"of version {NEXT} and need release 99.1.0 or a later one" in refused.err
    with pytest.raises(SchemaError, match=r"need release 99\.1\.0"):
        serve(database)


def test_the_newer_release_goes_back_and_this_one_runs_again(database: DatabaseSettings, tmp_path: Path) -> None:
    with newer_release(tmp_path, oldest=NEWER):
        migrate(database)

    with pytest.raises(SchemaError, match=f"need release {NEWER}"):
        downgrade(database, "0001")
    with newer_release(tmp_path, oldest=NEWER):
        downgrade(database, f"{int(NEXT) - 1:04}")
    serve(database)

    assert is_at_head(database)


def test_a_release_runs_on_its_own_tables(database: DatabaseSettings) -> None:
    with psycopg.connect(database.url.get_secret_value()) as connection:
        (note,) = connection.execute("SELECT obj_description('outbox.migration'::regclass)").fetchone() or (None,)

    assert note is not None
    assert note.startswith("oldest release that runs on these tables: ")
    assert release_needed(note) is None


def test_each_migration_names_the_tables_that_its_way_back_drops(database: DatabaseSettings) -> None:
    scripts = ScriptDirectory(str(SCRIPTS))
    for script in scripts.iterate_revisions("head", "base"):
        with psycopg.connect(database.url.get_secret_value()) as connection:
            (before,) = connection.execute(TABLES).fetchone() or ([],)
            found = current_revision(database)
        below = str(script.down_revision or "base")

        downgrade(database, below)

        with psycopg.connect(database.url.get_secret_value()) as connection:
            (after,) = connection.execute(TABLES).fetchone() or ([],)
        assert set(dropped_tables(found, below)) == set(before) - set(after), script.revision
