"""What a failed run leaves behind: waiting rows, the holders of their lanes, and the end of each relay's log."""

from collections.abc import Iterator
from pathlib import Path

import psycopg

LAST_LINES = 25  # of each log

REMAINS = """
    SELECT format('%s rows are %s, lanes %s, ids %s to %s', count(*), state, array_agg(DISTINCT lane), min(id), max(id))
    FROM outbox.message_state
    WHERE state <> 'sent'
    GROUP BY state
    UNION ALL
    SELECT format('%s has lanes %s and is %s: %s, in flight %s', name, lanes, state, reasons, in_flight)
    FROM outbox.node
    UNION ALL
    SELECT format('%s is in quarantine for %s: %s', routing_key, exchange, reason)
    FROM outbox.quarantine
"""


async def remains(database_url: str) -> list[str]:
    """Return lines about each state but `sent`, each node and each route in quarantine."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return [words for (words,) in await (await connection.execute(REMAINS)).fetchall()]


def last_words(logs: Path) -> Iterator[str]:
    """Return the last lines of each log."""
    for log in sorted(logs.glob("*.log")):
        yield f"--- {log.name}"
        yield from log.read_text().splitlines()[-LAST_LINES:]
