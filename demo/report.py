"""What the reader sees while the demo runs: a line a step, with a spinner and counts on a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

SPEAK_EVERY = 5.0  # seconds, when nobody sees the spinner


class Step:
    """One step under way."""

    def __init__(self, name: str, console: Console) -> None:
        self.name = name
        self._console = console
        self._started = self._spoke = time.monotonic()
        self._ended: float | None = None
        self._words = ""

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def end(self) -> None:
        """Stop its clock."""
        self._ended = time.monotonic()

    def note(self, words: str) -> None:
        """Show how it stands; the last words stay in the step's line."""
        self._words = words
        if not self._console.is_terminal and time.monotonic() - self._spoke > SPEAK_EVERY:
            self._spoke = time.monotonic()
            self._console.print(Text("  ") + self.line(), soft_wrap=True)

    def line(self) -> Text:
        return Text(f"{self.name:<28} {self.seconds:6.1f} s  {self._words}")


class Report:
    """Prints steps to a console; where that is a file or a pipe, a long step says how it stands now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Show a step while the block runs, then its time. A step that fails gets no line: the error is shown."""
        step = Step(name, self.console)
        if self.console.is_terminal:
            spinner = Spinner("dots")

            def show() -> Spinner:
                spinner.update(text=step.line())
                return spinner

            with Live(get_renderable=show, console=self.console, transient=True, refresh_per_second=8):
                yield step
        else:
            yield step
        step.end()
        self.console.print(Text("✓ ", style="green") + step.line(), soft_wrap=True)

    def say(self, words: str) -> None:
        """Print a line."""
        self.console.print(words, highlight=False, soft_wrap=True)
