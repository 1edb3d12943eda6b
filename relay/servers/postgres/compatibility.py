"""Which releases run on the tables: `relay migrate` writes the oldest one into the database.

It is a comment on the table `migration`. A release that is older than the tables reads it to know whether it may use
them. That happens, for example, after the image was rolled back.
"""

import re

from psycopg.sql import SQL

import relay
from relay.errors import SchemaError

# The revision, and the note if there is one. A dump made with --no-comments has no note; then no limit is known.
READ_TABLES = SQL("SELECT version_num, obj_description(tableoid, 'pg_class') FROM {schema}.migration")
NOTE = "oldest release that runs on these tables: "


def note_of(releases: list[str]) -> str:
    """Return the comment for tables whose migrations name these as the oldest releases that run on them."""
    return NOTE + max(releases, key=_number)


def release_needed(note: str | None) -> str | None:
    """Return the oldest release that runs on the tables if this release is older, else `None`."""
    if note is None or not note.startswith(NOTE):
        return None
    oldest = note.removeprefix(NOTE)
    return oldest if _number(relay.__version__) < _number(oldest) else None


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
