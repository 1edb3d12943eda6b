"""The stages of a job: after so many rows it waits for their outcome, and it pauses when too many of them failed."""

from dataclasses import dataclass

from relay.jobs.job import Job


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a job, after which it waits for the outcome.

    Attributes:
        begin, end: behind how many rows of the job.
    """

    begin: int
    end: int


def stage_of(job: Job) -> Stage | None:
    """Return the stage that a job is in; None: behind the last one, or there are no stages."""
    ends = job.stages or []
    if job.stage >= len(ends):
        return None
    return Stage(ends[job.stage - 1] if job.stage else 0, ends[job.stage])


def why_paused(job: Job, rows: int, failing: int, words: str) -> str | None:
    """Return why a job pauses behind a stage; None: it goes on.

    Args:
        words: what came of the stage.
    """
    most = job.stop_when_failing
    if most is None or failing <= most * max(rows, 1):
        return None
    return f"{words}, and at most {most:.0%} may"
