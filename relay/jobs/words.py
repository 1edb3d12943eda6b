"""How a job stands, in the words of commands and pages."""

from datetime import timedelta

from relay.jobs.job import Job, JobState, Kind, Source

SETTLED = 1.0  # seconds of a run, before which its rate would be a guess


def state_of(job: Job) -> str:
    """Return the state of a job in words."""
    if job.state is JobState.WAITING or (job.state is JobState.INTERRUPTED and job.by_console):
        return "waits for its turn"
    if job.state is JobState.RUNNING and job.waiting is not None:
        return "watches the outcome"
    return job.state


def how_far(job: Job) -> str:
    """Return how much of a job is done, and of how many: "3 of 12,000"."""
    if job.selected is not None:
        return f"{job.done:,} of {job.selected:,}"
    if job.to_scan is not None:
        return f"{job.done:,}, in {job.scanned or 0:,} of the queue's {job.to_scan:,} letters"
    return f"{job.done:,}"


def share_of(job: Job) -> tuple[int, int] | None:
    """Return how much is done, and of how many; None while nobody knows how many there are."""
    if job.selected is not None:
        return min(job.tried, job.selected), max(job.selected, 1)
    if job.to_scan is not None:
        return min(job.scanned or 0, job.to_scan), max(job.to_scan, 1)
    return None


def speed_words(job: Job) -> str | None:
    """Return how fast a job goes, on average since its process began: "1,200 a second, 3 min left".

    None: it does not, or has just begun. How long it takes is left out while nobody knows how many rows there are.
    """
    seconds, began_with = job.run_seconds, job.began_with
    if job.state is not JobState.RUNNING or job.waiting is not None or seconds is None or began_with is None:
        return None
    rate = (job.tried - began_with) / max(seconds, SETTLED)
    if seconds < SETTLED or rate <= 0:
        return None
    words = f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.1f} a second"
    if job.selected is not None:
        left = (job.selected - job.tried) / rate
    elif job.to_scan is not None and job.scanned:
        left = (job.to_scan - job.scanned) * seconds / job.scanned
    else:
        return words
    return f"{words}, {_roughly(timedelta(seconds=min(max(left, 0.0), timedelta.max.total_seconds() / 2)))} left"


def outcome_of(job: Job) -> str | None:
    """Return what became of what a job has sent: "of 12,000: 12,000 parked again"; None: it sends nothing."""
    match job.kind, job.source:
        case Kind.REPLAY, _:
            return f"{job.done:,} confirmed by the broker, {job.failed:,} refused" if job.tried else None
        case Kind.RETRY, Source.DEAD_LETTER:
            return _of_letters(job)
        case Kind.RETRY, _:
            return _of_rows(job)
        case _:
            return None


def _of_rows(job: Job) -> str | None:
    if not job.done:
        return None
    watched = job.watched or 0
    if not watched:
        return "not watched: `relay failures list` tells what is parked again"
    is_whole = watched >= job.done
    of = f"of {job.done:,}" if is_whole else f"of the first {watched:,} of {job.done:,}"
    if job.waiting is None:
        return f"{of}: {job.failed:,} parked again until now" if job.failed or job.is_over else None
    counts = {
        f"{'' if is_whole else 'at least '}{job.failed:,} parked again": job.failed,
        f"{job.waiting:,} not sent yet": job.waiting,
        f"{'all' if watched == (sent := watched - job.failed - job.waiting) else f'{sent:,}'} sent": sent,
    }
    return f"{of}: {', '.join(words for words, number in counts.items() if number > 0)}"


def _of_letters(job: Job) -> str | None:
    if not job.done:
        return None
    where = f"`relay failures list --queue {job.filter.get('queue')}` tells what failed again"
    tried = done_in_stages(job)
    if not tried:
        return f"not watched: {where}"
    words = f"of {tried:,} in stages: {job.failed:,} failed again"
    return words if tried == job.done else f"{words}; the others are not watched: {where}"


def is_unwatched(job: Job) -> bool:
    """Whether nobody knows what became of rows that a job has sent back."""
    if job.kind is not Kind.RETRY or not job.done:
        return False
    return job.done > done_in_stages(job) if job.source is Source.DEAD_LETTER else not job.watched


def done_in_stages(job: Job) -> int:
    """Return how many rows were done in stages that have ended."""
    ended = (job.stages or [])[: job.stage]
    return min(job.done, ended[-1]) if ended else 0


def _roughly(left: timedelta) -> str:
    seconds = left.total_seconds()
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"
