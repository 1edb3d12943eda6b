"""The version that this release's tables have, and which releases run on the tables of a database.

`relay migrate` writes the oldest release that runs on them into the database: as a comment on the table `migration`. A
release that is older than the tables reads it to know whether it may use them. That happens, for example, after the
image was rolled back.

All that without Alembic: with SQLAlchemy it takes 0.4 s to import, and `relay healthcheck` runs every few seconds.
"""

import re
from pathlib import Path

from psycopg import errors
from psycopg.sql import SQL

import relay
from relay.errors import SchemaError

_PACKAGE = Path(relay.__file__).parent

# Inside the installed package, or next to it in a checkout. Where it is neither, as in a zip, all but migrations works.
SCRIPTS = _INSTALLED if (_INSTALLED := _PACKAGE / "migrations").is_dir() else _PACKAGE.parent / "migrations"

# The revision, and the note if there is one. A dump made with --no-comments has no note; then no limit is known.
READ_TABLES = SQL("SELECT version_num, obj_description(tableoid, 'pg_class') FROM {schema}.migration")
# What a statement raises where the tables are missing or of an earlier release, also while a relay runs.
TABLES_MISSING = (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName)
NOTE = "oldest release that runs on these tables: "


def head_revision() -> str:
    """Return the newest revision: the number that its file's name begins with.

    tests/migrations/test_migrate.py compares with Alembic, which reads the files.
    """
    return max(file.name.partition("_")[0] for file in (SCRIPTS / "versions").glob("[0-9]*_*.py"))


def note_of(releases: list[str]) -> str:
    """Return the comment for tables whose migrations name these as the oldest releases that run on them."""
    return NOTE + max(releases, key=_number)


def release_needed(note: str | None) -> str | None:
    """Return the oldest release that runs on the tables if this release is older, else `None`."""
    if note is None or not note.startswith(NOTE):
        return None
    oldest = note.removeprefix(NOTE)
    return oldest if _number(relay.__version__) < _number(oldest) else None


def tables_missing(schema: str) -> SchemaError:
    """Return the error for one of `TABLES_MISSING`."""
    return SchemaError(f"the outbox tables are missing in schema {schema!r}: run `relay migrate`")


def refuse_newer(schema: str, revision: str, note: str | None) -> None:
    """Check that this release runs on the tables of a newer one.

    Raises:
        SchemaError: it does not; the message names the release that is needed.
    """
    if needed := release_needed(note):
        raise SchemaError(
            f"the outbox tables in schema {schema} are of version {revision} and need release {needed} or a later one."
            f" This is release {relay.__version__}: run release {needed}, or let that release go back first with"
            " `relay migrate --downgrade`"
        )


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])
