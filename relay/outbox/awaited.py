"""A write that reports an error when the application does not await it."""

import sys
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from relay.outbox.errors import NotAwaitedError


class Awaited(Coroutine[Any, Any, None]):
    """The coroutine of a write. Python drops its own coroutines with only a warning, which many setups hide.

    When it is dropped before it has begun, it raises NotAwaitedError. No code can catch that: `sys.unraisablehook`
    prints it to stderr, at once or at the garbage collection. In a block of `EachBegun`, the end of the block raises.

    Args:
        depth: frames between this call and the application's.
    """

    __slots__ = ("_begun", "_block", "_coroutine", "place")

    def __init__(self, coroutine: Coroutine[Any, Any, None], depth: int) -> None:
        self._begun = False
        self._coroutine = coroutine
        frame = sys._getframe(depth + 1)
        self.place = (frame.f_code.co_filename, frame.f_lineno)
        self._block = _block.get()
        if self._block is not None:
            self._block.note(self)

    def __await__(self) -> Generator[Any, Any, None]:
        self._begin()
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        self._begin()
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._begin()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._begin()
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._begun:
            self.close()
            raise NotAwaitedError(*self.place)

    def _begin(self) -> None:
        self._begun = True
        if self._block is not None:
            self._block.forget(self)


class EachBegun:
    """A block of an `async def` in which each write must begin, also in tasks that are created in it.

    A write that has not begun at its end is never made: in a task, it would come into a later transaction.

    Raises:
        NotAwaitedError: a write had not begun at the end of a block that no other error has ended.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[Awaited, None] | None = {}  # in the order of the calls; None: the block is over

    def __enter__(self) -> None:
        _block.set(self)  # not reset: a block that is over notes nothing, and the garbage collector has another context

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        waiting, self._waiting = self._waiting, None
        if kind is None and waiting:
            for each in waiting:
                each.close()
            raise NotAwaitedError(*next(iter(waiting)).place)

    def note(self, write: Awaited) -> None:
        if self._waiting is not None:
            self._waiting[write] = None

    def forget(self, write: Awaited) -> None:
        if self._waiting is not None:
            self._waiting.pop(write, None)


_block: ContextVar[EachBegun | None] = ContextVar("block", default=None)
