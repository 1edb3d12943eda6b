"""A write that reports an error when the application does not await it."""

import sys
from collections.abc import Coroutine, Generator
from typing import Any

from relay.outbox.errors import NotAwaitedError


class Awaited(Coroutine[Any, Any, None]):
    """The coroutine of a write. Python drops its own coroutines with only a warning, which many setups hide.

    When it is dropped before it has begun, it raises NotAwaitedError. No code can catch that: `sys.unraisablehook`
    prints it to stderr, at once or at the garbage collection.

    Args:
        depth: frames between this call and the application's.
    """

    __slots__ = ("_begun", "_coroutine", "_place")

    def __init__(self, coroutine: Coroutine[Any, Any, None], depth: int) -> None:
        self._begun = False
        self._coroutine = coroutine
        frame = sys._getframe(depth + 1)
        self._place = (frame.f_code.co_filename, frame.f_lineno)

    def __await__(self) -> Generator[Any, Any, None]:
        self._begun = True
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._begun = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._begun = True
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._begun:
            self.close()
            raise NotAwaitedError(*self._place)
