"""Read moments and lengths of time as an operator writes them."""

from datetime import UTC, datetime, timedelta

from relay.config.durations import DURATION, DURATIONS, parse_duration
from relay.errors import UsageError

FORMS = f"2026-11-21T08:00:00Z, 2026-11-21 (midnight UTC), or {DURATIONS} ago"


def parse_moment(text: str, name: str, now: datetime) -> datetime:
    """Return the moment that `text` names, in UTC.

    Args:
        name: the flag, for the error.
    Raises:
        UsageError: it is no moment, or says no time zone.
    """
    try:
        if DURATION.fullmatch(text):
            return now - parse_duration(text)
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None and len(text) > len("2026-11-21"):
            raise UsageError(f"{name} {text} says no time zone: add Z, or an offset such as +02:00")
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{name} takes a moment such as {FORMS}; not {text!r}") from None


def parse_interval(since: str | None, until: str | None, now: datetime) -> tuple[datetime | None, datetime | None]:
    """Return the moments of `--since` and `--until`; UsageError when nothing can lie between them."""
    first = None if since is None else parse_moment(since, "--since", now)
    end = None if until is None else parse_moment(until, "--until", now)
    if first is not None and first >= (end or now):
        raise UsageError(f"--since {since} is not before {f'--until {until}' if until else 'now'}")
    return first, end


def parse_length(text: str, name: str) -> timedelta:
    """Return the length of time that `text` names; UsageError when it is no length of time."""
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(f"{name} takes a length of time such as {DURATIONS}; not {text!r}") from None
