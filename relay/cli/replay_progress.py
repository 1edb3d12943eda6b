"""How far a replay is: a bar on a terminal, else a log event every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relay.observe.log import set_up
from relay.replay import run
from relay.replay.job import Job
from relay.settings import LogSettings

log = structlog.get_logger(__name__)

LOG_INTERVAL = 5.0  # seconds

Show = Callable[[run.Progress], None]


@contextmanager
def shown_progress(settings: LogSettings, job: Job) -> Iterator[Show]:
    """Give what takes note of the progress, and set up the log beside it."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, job) as show:
            set_up(settings)  # now: events are printed above the bar
            yield show
    else:
        set_up(settings)
        yield _events(job)


@contextmanager
def _bar(console: Console, job: Job) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"replay {job.id}: listing", total=None, rate="")

        def show(seen: run.Progress) -> None:
            speed = bar.tasks[0].speed
            failed = f"  {seen.failed:,} failed" if seen.failed else ""
            if seen.selected is not None:
                bar.update(
                    task,
                    description=f"replay {job.id}",
                    total=seen.selected,
                    completed=seen.replayed + seen.failed,
                    rate=f"{speed or 0:,.0f}/s{failed}",
                )

        yield show


def _events(job: Job) -> Show:
    due = time.monotonic() + LOG_INTERVAL

    def show(seen: run.Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_INTERVAL
            log.info("replay.progressed", replay=job.id, **seen._asdict())

    return show
