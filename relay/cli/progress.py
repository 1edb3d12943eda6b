"""How far a command is: a bar on a terminal, else a log event every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relay.config.settings import LogSettings
from relay.observe.log import set_up

LOG_INTERVAL = 5.0  # seconds


class SeenProgress(NamedTuple):
    """How far it is."""

    total: int | None  # None while the rows are being counted
    done: int
    failed: int  # of these


Show = Callable[[SeenProgress], None]


@contextmanager
def shown_progress(settings: LogSettings, title: str, tell: Callable[[SeenProgress], None]) -> Iterator[Show]:
    """Yield the function that shows the progress, and set up the log.

    Args:
        title: of the bar.
        tell: logs the event; called every few seconds where no bar is drawn.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, title) as show:
            set_up(settings)  # now: events are printed above the bar
            yield show
    else:
        set_up(settings)
        yield _events(tell)


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{title}: listing", total=None, rate="")

        def show(seen: SeenProgress) -> None:
            speed = bar.tasks[0].speed
            failed = f"  {seen.failed:,} failed" if seen.failed else ""
            if seen.total is not None:
                bar.update(
                    task,
                    description=title,
                    total=seen.total,
                    completed=seen.done,
                    rate=f"{speed or 0:,.0f}/s{failed}",
                )

        yield show


def _events(tell: Callable[[SeenProgress], None]) -> Show:
    due = time.monotonic() + LOG_INTERVAL

    def show(seen: SeenProgress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_INTERVAL
            tell(seen)

    return show
