"""Read moments and lengths of time as an operator writes them."""

from datetime import UTC, datetime, timedelta, tzinfo

from relay.config.durations import DURATION, DURATIONS, parse_duration
from relay.errors import UsageError

FORMS = f"2026-11-21T08:00:00Z, 2026-11-21 (midnight UTC), or {DURATIONS} ago"


def parse_moment(text: str, name: str, now: datetime, *, zone: tzinfo | None = None) -> datetime:
    """Return the moment that `text` names, in UTC.

    It takes what the console and the commands print, `2026-11-21 08:00:00 UTC` too, and `2h` or `2h ago`.

    Args:
        name: the flag or field, for the error.
        zone: of a time that names no zone; without it such a time is refused.
    Raises:
        UsageError: it is no moment, or says no time zone.
    """
    try:
        if DURATION.fullmatch(length := text.removesuffix(" ago")):
            return now - parse_duration(length)
        bare = text.removesuffix("UTC").rstrip()
        moment = datetime.fromisoformat(bare)
        if moment.tzinfo is None and zone is None and text == bare and len(text) > len("2026-11-21"):
            raise UsageError(f"{name} {text} says no time zone: add Z, or an offset such as +02:00")
        return moment.replace(tzinfo=moment.tzinfo or (zone if text == bare else UTC) or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{name} takes a moment such as {FORMS}; not {text[:80]!r}") from None


def parse_interval(
    since: str | None,
    until: str | None,
    now: datetime,
    *,
    names: tuple[str, str] = ("--since", "--until"),
    zone: tzinfo | None = None,
) -> tuple[datetime | None, datetime | None]:
    """Return the moments of `--since` and `--until`, or of fields with these names, as `parse_moment` does.

    Raises:
        UsageError: one is no moment, or nothing can lie between them.
    """
    first = None if since is None else parse_moment(since, names[0], now, zone=zone)
    end = None if until is None else parse_moment(until, names[1], now, zone=zone)
    if first is not None and first >= (end or now):
        raise UsageError(f"{names[0]} {since} is not before {f'{names[1]} {until}' if until else 'now'}")
    return first, end


def parse_length(text: str, name: str) -> timedelta:
    """Return the length of time that `text` names; UsageError when it is no length of time."""
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(f"{name} takes a length of time such as {DURATIONS}; not {text!r}") from None
