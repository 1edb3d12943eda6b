"""What the private servers have in common: a folder, a process, and an end in any case."""

import signal
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.process import Process, ServerError


class PrivateServer(ABC):
    """A server; `with` starts and stops it. Meanwhile it can be stopped and started again, on the same ports.

    `folder`: where its data is kept for the next one; without it a temporary one that is removed.
    `durable`: a temporary one is on the disk; else in memory, where there is enough.
    """

    IN_ORDER: ClassVar[signal.Signals]  # tells it to end and to leave nothing to recover

    def __init__(self, folder: Path | None, *, durable: bool = True) -> None:
        self.port = 0
        self._given_folder = folder
        self._durable = durable
        self._process: Process | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            temporary = temporary_folder(in_memory=not self._durable)
            self._prepare(self._given_folder or self._stack.enter_context(temporary))
            self.start()
        except BaseException:  # Ctrl-C too: nothing is left behind
            self.stop(signal.SIGKILL)
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._stack.close()

    @property
    def pid(self) -> int:
        """Whom to send signals to."""
        return self.process.pid

    @property
    def process(self) -> Process:
        """Its first process.

        Raises:
            ServerError: it is not running.
        """
        if self._process is None:
            raise ServerError(f"{type(self).__name__} is not running")
        return self._process

    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running()

    @abstractmethod
    def start(self) -> None:
        """Start the server on its folder; it keeps its ports from one start to the next.

        Raises:
            ServerError: it did not come up; the message shows the end of its log.
        """

    def stop(self, how: signal.Signals | None = None) -> None:
        """Stop it in order, or by another signal."""
        if self._process is not None:
            self._process.stop(how or self.IN_ORDER)
            self._process = None

    @abstractmethod
    def _prepare(self, folder: Path) -> None:
        """Make in the folder what `start` needs."""
