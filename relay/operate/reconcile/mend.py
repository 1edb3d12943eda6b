"""The command that sends again what consumers lack."""

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from relay.operate.reconcile.compare import IDS_KEPT
from relay.operate.reconcile.report import Mend
from relay.replay.selection import Selection


def mend_command(
    missing_ids: Sequence[str], *, first_sent: datetime, last_sent: datetime, selection: Selection, flags: Iterable[str]
) -> Mend:
    """Return the `relay replay` that sends the missing messages: by id when they are few, else all of their time.

    Args:
        flags: where the settings are, as the command that found them was told.
    """
    is_exact = len(missing_ids) <= IDS_KEPT
    words = ["relay", "replay", *flags]
    words += ["--since", first_sent.isoformat(), "--until", (last_sent + timedelta(microseconds=1)).isoformat()]
    if is_exact:
        words += missing_ids
    else:
        words += [str(message_id) for message_id in selection.message_ids or ()]
        for name in ("aggregate_type", "aggregate_id", "event_type"):
            if (value := getattr(selection, name)) is not None:
                words.append(f"--{name.replace('_', '-')}={value}")
    return Mend(shlex.join(words), is_exact)
