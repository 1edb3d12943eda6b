"""Numbers, times and texts as the pages show them."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, assert_never

from markupsafe import Markup, escape

from relay.jobs.job import Job, JobState
from relay.jobs.words import is_unwatched
from relay.runtime.memory import size_words

NOTHING = "-"
NAMES = {"aggregate_type": "type of key", "aggregate_id": "key", "group": "failure group", "ids": "rows"}  # of a filter
MOST_LISTED = 20
MOMENT = re.compile(r"(?a)\b(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(?: UTC\b|Z\b)")  # as pages and commands print it


def number(value: float | None) -> str:
    """Return a number with commas: 12,345."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a number in few digits: 9,999, 12.3 k, 1.2 M."""
    if value is None:
        return NOTHING
    for least, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= least:
            unit = 1e3 if word == "k" else least
            return f"{_brief(value / unit)} {word}"
    return f"{value:,.0f}" if value >= 10 else _brief(value)


def _brief(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def size(count: int | None) -> str:
    """Return a number of bytes: 200 bytes, 1.5 KiB, 64 MiB."""
    return NOTHING if count is None else size_words(count)


def duration(seconds: float | None) -> str:
    """Return a length of time in its largest unit: 4 ms, 1.5 s, 3 min, 2 h, 5 d."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    for unit, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {word}"
    return f"{_brief(seconds) if seconds < 10 else round(seconds)} s"


def utc(at: datetime | None) -> str:
    """Return a moment to the second: 2026-11-29 06:31:58 UTC."""
    return NOTHING if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def moment(at: datetime | None) -> str:
    """Return a moment as an element, which a script adds its age and the local time to (static/times.js)."""
    return NOTHING if at is None else marked(utc(at))


def job_mood(job: Job) -> str:
    """Return the colour of a job: green only where all that it has done is done for good, as far as it knows."""
    match job.state:
        case JobState.DONE:
            return "warning" if job.failed or job.waiting else "skipped" if is_unwatched(job) else "ok"
        case JobState.PAUSED | JobState.INTERRUPTED:
            return "warning"
        case JobState.WAITING | JobState.CANCELLED:
            return "skipped"
        case JobState.RUNNING:
            return "running"
        case _:
            assert_never(job.state)


def chosen(filter_: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a job's filter names, each with its value: the columns of rows as the search calls them."""
    named = [(NAMES.get(name, name.replace("_", " ")), value) for name, value in filter_.items() if value]
    return [(name, _listed(value)) for name, value in named]


def _listed(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    more = len(value) - MOST_LISTED
    return ", ".join(map(str, value[:MOST_LISTED])) + (f", and {more:,} more" if more > 0 else "")


def marked(words: str) -> Markup:
    """Return words with what stands in backticks as code, and moments as elements; everything is escaped."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words)))
    return Markup(MOMENT.sub(r'<time datetime="\1T\2Z">\1 \2 UTC</time>', text))  # noqa: S704  (escaped just before)
