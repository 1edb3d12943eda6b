"""The table `dead_letter_audit`: who has sent back or thrown away which dead letter, when and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from relay.operate.letters.letter import Letter
from relay.servers.postgres.tables import Tables


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What the rows of one command have in common."""

    command: str  # retry, discard
    queue: str  # of the dead letters
    sent_to: str | None
    done_by: str
    why: str
    job: int | None = None


WRITE = SQL("""
    INSERT INTO {schema}.dead_letter_audit
        (command, queue, sent_to, done_by, why, job, message_id, event_type, key, reason, last_failed_at)
    SELECT %(command)s, %(queue)s, %(sent_to)s, %(done_by)s, %(why)s, %(job)s, letter.*
    FROM unnest(%(message_ids)s::text[], %(types)s::text[], %(keys)s::text[], %(reasons)s::text[],
                %(failed_at)s::timestamptz[]) AS letter
""")


async def write_audit(
    connection: psycopg.AsyncConnection[Any], schema: str, entry: AuditEntry, letters: Sequence[Letter]
) -> None:
    """Commit a row for each; for no letters it fails, too, where it would for one: right, table, standby."""
    await connection.execute(
        WRITE.format(schema=Identifier(schema)),
        {
            "command": entry.command,
            "queue": entry.queue,
            "sent_to": entry.sent_to,
            "done_by": entry.done_by,
            "why": entry.why,
            "job": entry.job,
            "message_ids": [storable(each.message_id) for each in letters],
            "types": [storable(each.type) for each in letters],
            "keys": [storable(each.key) for each in letters],
            "reasons": [storable(each.reason) for each in letters],
            "failed_at": [each.last_failed_at for each in letters],
        },
    )


READ_NOTES = SQL("""
    SELECT message_id, last_failed_at FROM {schema}.dead_letter_audit
    WHERE job = %(job)s AND message_id = ANY (%(message_ids)s)
""")


def notes_of(tables: Tables, job: int, message_ids: Sequence[str]) -> set[tuple[str, datetime | None]]:
    """Return which of these messages' letters a job has changed, each with the moment of its last failure before.

    The ids are those of the table: as `storable` returns them.
    """
    return set(tables.execute(READ_NOTES, which_notes(job, message_ids)).fetchall())


def which_notes(job: int, message_ids: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of READ_NOTES."""
    return {"job": job, "message_ids": [storable(each) for each in message_ids]}


def storable(text: str | None) -> str | None:
    """Return a text with its NULs escaped: a text of PostgreSQL cannot hold them."""
    return text and text.replace("\0", r"\x00")
