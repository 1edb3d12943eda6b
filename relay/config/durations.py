"""Lengths of time as people write them, in every setting and flag: `30s`, `90 seconds`, `2h`, `14d`, `14 days`."""

import re
from datetime import timedelta

DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|d|seconds?|minutes?|hours?|days?)", re.ASCII)
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
DURATIONS = "90s, 30 minutes, 2h, 14 days"  # for errors and helps


def parse_duration(text: str) -> timedelta:
    """Return the length of time that `text` names.

    Raises:
        ValueError: it names no duration, or one that is too long.
    """
    if not (found := DURATION.fullmatch(text)):
        raise ValueError
    try:
        return timedelta(**{UNITS[found[2][0]]: float(found[1])})
    except OverflowError:
        raise ValueError from None


def seconds_of(value: object) -> object:
    """Return the seconds of a length of time in words; anything else, such as a number, as it is."""
    if isinstance(value, str) and DURATION.fullmatch(value):
        return parse_duration(value).total_seconds()
    return value
