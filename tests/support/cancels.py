"""Cancel a task at each moment of a run, one after the other, and look whether anything is left open.

A run has a moment wherever one of its tasks begins to wait, is about to wake, or ends. A cancel between the end of a
wait and the step of the task behind it is how the result of the wait is lost.
"""

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import relay
from tests.support.eventually import eventually

Lines = tuple[str, ...]

RELAY = str(Path(relay.__file__).parent)


class Kind(StrEnum):
    """What a task does at a moment."""

    WAITS = "waits"
    WAKES = "wakes"  # what it waited for has come, and its next step is still to run
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Moment:
    """The first time at which a task is at these lines of the relay, from the outermost to the innermost."""

    kind: Kind
    lines: Lines

    def __str__(self) -> str:
        return f"{self.kind} {' > '.join(self.lines)}"


@dataclass
class Run:
    """One run, of which each moment is noted, and which is cancelled at one of them.

    Attributes:
        at: the moment of the cancel; None: it is not cancelled.
        again: cancel once more at so many waits of the task after that, while it closes what it has open; 0: do not.
        passed: its moments, in order.
        is_cancelled: whether it came to the moment.
    """

    at: Moment | None = None
    again: int = 0
    passed: dict[Moment, None] = field(default_factory=dict)
    is_cancelled: bool = False
    _task: asyncio.Task[None] | None = None
    _is_closing: bool = False

    @contextmanager
    def of(self, work: Coroutine[Any, Any, None]) -> Iterator[asyncio.Task[None]]:
        """Yield the task of this work."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()

        def watched(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
            return asyncio.Task(_Steps(self, work), loop=loop, **options)

        loop.set_task_factory(watched)
        try:
            self._task = asyncio.create_task(work)
            yield self._task
        finally:
            loop.set_task_factory(before)

    def step(self, work: Any, lines: Lines, step: Callable[..., Any], given: Any) -> tuple[Any, Lines]:
        """Let a task go on to its next wait; return what it waits for, and its lines there.

        Args:
            lines: of its last wait.
        """
        loop = asyncio.get_running_loop()
        is_ours = asyncio.current_task() is self._task
        self._is_closing |= is_ours and isinstance(given, asyncio.CancelledError)
        try:
            waited = step(given)
        except StopIteration:
            self._pass(Kind.ENDS, lines, loop.call_soon)
            raise
        finally:
            del given  # an error that a frame keeps would keep what the frames of its traceback have open
        lines = lines_of(work)
        self._pass(Kind.WAITS, lines, loop.call_soon)
        if asyncio.isfuture(waited):
            self._pass(Kind.WAKES, lines, partial(_when_done, waited))
        if is_ours and self._is_closing and self.again:
            self.again -= 1
            if not self.again:
                loop.call_soon(self._cancel)
        return waited, lines

    def _pass(self, kind: Kind, lines: Lines, strike: Callable[[Callable[[], None]], object]) -> None:
        moment = Moment(kind, lines)
        if not lines or moment in self.passed:
            return
        self.passed[moment] = None
        if moment == self.at:
            self.is_cancelled = True
            strike(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()


class _Steps(Coroutine[Any, Any, Any]):
    """The work of a task, each step of which the run sees."""

    def __init__(self, run: Run, work: Any) -> None:
        self._run = run
        self._work = work
        self._lines: Lines = ()

    def send(self, value: Any) -> Any:
        waited, self._lines = self._run.step(self._work, self._lines, self._work.send, value)
        return waited

    def throw(self, error: Any, *_: Any) -> Any:
        try:
            waited, self._lines = self._run.step(self._work, self._lines, self._work.throw, error)
        finally:
            del error  # as above
        return waited

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._work.__await__())


def _when_done(waited: asyncio.Future[Any], cancel: Callable[[], None]) -> None:
    waited.add_done_callback(lambda _: cancel())  # before the task is told, which adds its callback later


def lines_of(work: Any) -> Lines:
    """Return the lines of the relay in which a coroutine waits, from the outermost."""
    lines = []
    while (frame := getattr(work, "cr_frame", None) or getattr(work, "ag_frame", None)) is not None:
        if frame.f_code.co_filename.startswith(RELAY):
            lines.append(f"{frame.f_code.co_filename.removeprefix(RELAY)}:{frame.f_lineno}")
        work = getattr(work, "cr_await", None) or getattr(work, "ag_await", None)
    return tuple(lines)


@dataclass(frozen=True)
class Open:
    """What this process has open: sockets and files by their names, and tasks."""

    files: frozenset[str]
    tasks: frozenset[asyncio.Task[Any]]

    @classmethod
    def now(cls) -> "Open":
        return cls(frozenset(_names()), frozenset(asyncio.all_tasks()))

    async def is_all(self) -> None:
        """Return when nothing else is open. Raises AssertionError: something stays open."""
        try:
            await eventually(lambda: not self._left(), "all is closed")
        except TimeoutError:
            left = self._left()
            gc.collect()
            raise AssertionError(f"it stays open: {left}; after a garbage collection: {self._left()}") from None

    def _left(self) -> list[str]:
        now = Open.now()
        return [*sorted(now.files - self.files), *(repr(task) for task in now.tasks - self.tasks)]


def _names() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the list itself
            continue
        if not name.startswith(("anon_inode", "pipe", "/dev")):
            yield name + (_peer_of(number) if name.startswith("socket:") else "")


def _peer_of(number: str) -> str:
    """Return whom a socket is connected to, for the words of a failure."""
    with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
        return f" to {found.getpeername()}"
    return ""


Trial = Callable[[Run], Coroutine[Any, Any, None]]
RUNS = 3  # for one moment: answers of servers come in another order each time, and a run may pass it by


async def moments_of(trial: Trial) -> list[Moment]:
    """Return the moments of a run that nobody cancels. It is the second one: the first makes what it does not find."""
    await trial(Run())
    whole = Run()
    await trial(whole)
    return list(whole.passed)


async def cancel_at(moments: Sequence[Moment], trial: Trial, *, again: int = 0) -> None:
    """Run a trial for each of these moments, and cancel it there.

    Raises:
        AssertionError: the trial raised one at some moments, or too few runs came to their moment.
    """
    failed: list[str] = []
    cancelled = 0
    for moment in moments:
        for _ in range(RUNS):
            run = Run(moment, again)
            try:
                await trial(run)
            except AssertionError as error:
                failed.append(f"{moment}: {error}")
            if run.is_cancelled:
                cancelled += 1
                break
    assert not failed, "\n".join(failed)
    assert 2 * cancelled > len(moments), f"of {len(moments)} moments runs came to {cancelled} only"
