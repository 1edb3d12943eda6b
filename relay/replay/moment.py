"""Read a moment as an operator writes it."""

import re
from datetime import UTC, datetime, timedelta

from relay.errors import UsageError

AGO = re.compile(r"(\d+)([smhd])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
FORMS = "2026-11-21T08:00:00Z, 2026-11-21 (midnight UTC), or 90s, 30m, 2h, 3d ago"


def parse_moment(text: str, name: str, now: datetime) -> datetime:
    """Give the moment that `text` names, in UTC.

    Args:
        name: the flag, for the error.
    Raises:
        UsageError: it is no moment, or says no time zone.
    """
    try:
        if ago := AGO.fullmatch(text):
            return now - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None and len(text) > len("2026-11-21"):
            raise UsageError(f"{name} {text} says no time zone: add Z, or an offset such as +02:00")
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{name} takes a moment such as {FORMS}; not {text!r}") from None
