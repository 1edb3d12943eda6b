"""Numbers, times and texts as the pages show them."""

import re
from datetime import UTC, datetime
from typing import assert_never

from markupsafe import Markup, escape

from relay.jobs.job import Job, JobState
from relay.jobs.words import is_unwatched

NOTHING = "-"


def number(value: float | None) -> str:
    """Return a number with commas: 12,345."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a number in at most four digits: 1.2 million."""
    if value is None:
        return NOTHING
    for size, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            unit = 1e3 if word == "k" else size
            return f"{value / unit:.1f} {word}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Return a length of time in its largest unit: 4 ms, 1.5 s, 3 min, 2 h, 5 d."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def moment(at: datetime | None) -> str:
    """Return a time of UTC to the second."""
    return NOTHING if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


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


def commands(words: str) -> Markup:
    """Return words with what stands in backticks as code; everything is escaped."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))  # noqa: S704  (escaped just before)
