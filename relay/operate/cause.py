"""The cause of a failure: what is left of its words without numbers, ids and quoted values.

The database has the same steps as the function `failure_cause` (migrations/versions/0015_jobs.py), for parked rows.
"""

import re
from hashlib import sha256

NO_REASON = "no reason"
LENGTH = 500  # characters that count
STEPS = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"[ \t\r\n]+", " "),
        (r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", "*"),
        (r"(?<![A-Za-z0-9])'[^']*'", "'*'"),  # an apostrophe within a word opens no quote
        (r'(?<![A-Za-z0-9])"[^"]*"', '"*"'),
        (r"(?<![A-Za-z0-9])`[^`]*`", "`*`"),
        # A word with a digit, but no reply code: 312 NO_ROUTE stays.
        (r"[A-Za-z0-9_]*[0-9][A-Za-z0-9_]*(?![A-Za-z0-9_]| [A-Z]+_[A-Z])", "*"),
        (r"[*]([-.:/+,][*])+", "*"),  # dates, versions, decimals
    )
)


def cause_of(words: str | None) -> str:
    """Return the words without what differs between failures of one cause."""
    text = (words or "")[:LENGTH]
    for pattern, by in STEPS:
        text = pattern.sub(by, text)
    return text.strip(" ") or NO_REASON


def group_of(source: str, cause: str, event_type: str | None, place: str | None) -> str:
    """Return the id of a failure group: the same for the same four, on every machine."""
    return sha256("\x1f".join((source, cause, event_type or "", place or "")).encode()).hexdigest()[:12]
