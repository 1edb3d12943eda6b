"""The clocks of this host and of the database."""

import time
from collections.abc import Iterator

import psycopg

from relay.config.settings import Settings
from relay.operate.doctor.finding import Finding, Verdict

TOLERATED = 1.0  # seconds
LOOKS = 3  # the one with the shortest way there and back counts

READ_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


def clock_difference(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    """Nothing of the relay's decides by this host's clock, but people and their log compare times."""
    check = "database.clock"
    round_trip, ahead = min(_look(connection) for _ in range(LOOKS))
    direction = "ahead of" if ahead > 0 else "behind"
    words = f"the database's clock is {abs(ahead):.3f} s {direction} this host's, give or take {round_trip / 2:.3f} s"
    if abs(ahead) - round_trip / 2 <= TOLERATED:
        yield Finding(check, Verdict.OK, words)
    else:
        remedy = "set both by NTP: days and delays go by the database's clock, time stamps in the log by this host's"
        yield Finding(check, Verdict.WARNING, words, remedy)


def _look(connection: psycopg.Connection) -> tuple[float, float]:
    """Return the time there and back, and by how much the database is ahead of the middle of it; seconds."""
    asked = time.time()
    row = connection.execute(READ_CLOCK).fetchone()
    answered = time.time()
    theirs: float = row[0] if row else asked
    return answered - asked, theirs - (asked + answered) / 2
