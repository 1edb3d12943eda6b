"""Which rows a replay leaves out, in words for an operator."""

import psycopg

from relay.operate.messages.whereabouts import WhyMissing, find_rows
from relay.operate.sent.selection import Selection, count_waiting, first_day


def left_out(connection: psycopg.Connection, schema: str, selection: Selection) -> list[str]:
    """Return a line for each kind of rows that match and are not replayed: no longer kept, or not sent yet."""
    lines = []
    first = first_day(connection, schema)
    if first is not None and (selection.since is None or selection.since < first):
        lines.append(f"sent rows are kept from {first:%Y-%m-%d} (UTC) on; nothing older can be replayed")
    if selection.message_ids and selection.since is None and selection.until is None:
        found = find_rows(connection, schema, selection.message_ids).items()
        return lines + [
            f"{message_id} is not replayed: {row.words}"
            for message_id, row in found
            if isinstance(row, WhyMissing) or row.state != "sent"
        ]
    if selection.until is not None:
        return lines
    waiting = count_waiting(connection, schema, selection)
    if waiting.pending:
        lines.append(f"{waiting.pending} more rows match and are pending: they go out by themselves, not by a replay")
    if waiting.parked:
        lines.append(f"{waiting.parked} more rows match and are parked, never sent: `relay parked retry` sends them")
    return lines
