"""The command that sends again what consumers lack."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta

from relay.operate.reconcile.compare import IDS_KEPT
from relay.operate.reconcile.report import Mend
from relay.operate.sent.selection import SentSelection


def mend_command(
    missing_ids: Sequence[str],
    *,
    first_sent: datetime,
    last_sent: datetime,
    selection: SentSelection,
    event_types: Collection[str],
    flags: Iterable[str],
) -> Mend:
    """Return the `relay replay` that sends the missing messages: by id when they are few, else all of their time.

    Args:
        event_types: of what is missing.
        flags: where the settings are, as the command that found them was told.
    """
    is_exact = len(missing_ids) <= IDS_KEPT
    words = ["relay", "replay", *flags]
    words += ["--since", first_sent.isoformat(), "--until", (last_sent + timedelta(microseconds=1)).isoformat()]
    if is_exact:
        words += missing_ids
    else:
        words += [str(message_id) for message_id in selection.message_ids or ()]
        filters = {
            "--aggregate-type": selection.aggregate_type,
            "--aggregate-id": selection.aggregate_id,
            "--event-type": selection.event_type or (next(iter(event_types)) if len(event_types) == 1 else None),
        }
        words += [f"{flag}={value}" for flag, value in filters.items() if value is not None]
    return Mend(shlex.join(words), is_exact)
