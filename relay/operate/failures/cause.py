"""The cause of a failure, without what differs from one failure to the next, and the name of a group of equal causes.

PostgreSQL computes the same for parked rows (migrations/versions/0015_jobs.py); tests/failures/test_cause.py compares.
So no pattern has alternatives, or repeats as little as possible: the two engines choose differently then.
"""

import re
from enum import StrEnum
from hashlib import sha256

MOST_READ, MOST_KEPT = 500, 200  # characters
ID_LENGTH = 12  # hexadecimal digits: among 10,000 groups, two are equal in one of five million outboxes

# Of a number, the code of a reply stays: 312 NO_ROUTE. Dates, times and decimals are one number at the end.
STEPS = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r'"[^"]*"', "?"),
        (r"(^|[^A-Za-z0-9'])'[^']*'", r"\1?"),
        (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "#"),
        (r"[0-9a-fA-F]{16,}", "#"),
        (r"[0-9]+(?![0-9])(?! [A-Z]+_[A-Z])", "#"),
        (r"#([-.,:/+TZ]*#)+", "#"),
        (r"[ \t\r\n]+", " "),
    )
)


class FailureKind(StrEnum):
    """Where what failed waits."""

    PARKED = "parked"
    QUARANTINED = "quarantined"
    HELD = "held"  # by a consumer
    DEAD_LETTER = "dead letter"


def cause_of(words: str | None) -> str:
    """Return the words with `#` for each number and id, and `?` for each quoted value."""
    cause = (words or "")[:MOST_READ]
    for pattern, by in STEPS:
        cause = pattern.sub(by, cause)
    return cause.strip(" ")[:MOST_KEPT]


def failure_id(kind: FailureKind, cause: str, event_type: str | None, place: str | None) -> str:
    """Return the short name of a group, which stays the same on every server.

    Args:
        place: the exchange, or the consumer of a held message.
    """
    parts = "\x1f".join((kind, cause, event_type or "", place or ""))
    return sha256(parts.encode(errors="surrogatepass")).hexdigest()[:ID_LENGTH]
