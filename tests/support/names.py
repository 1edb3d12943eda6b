"""Host names that this process resolves as the test decides."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest.mock import patch


class Names(dict[str, list[str]]):
    """The addresses of each name. Every other name is resolved as usual.

    Attributes:
        answering: while it is cleared, no lookup of these names returns.
        asked: how often these names were looked up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answering = Event()
        self.answering.set()
        self.asked = 0
        self._usual = socket.getaddrinfo

    def getaddrinfo(self, host: Any, port: Any, *arguments: Any, **named: Any) -> list[Any]:
        if host not in self:
            return self._usual(host, port, *arguments, **named)
        self.asked += 1
        self.answering.wait()
        found = [self._usual(address, port, *arguments, **named) for address in self[host]]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for each in found for one in each]


@contextmanager
def resolving() -> Iterator[Names]:
    """Yield names to add addresses to; they resolve until the end of the block."""
    answers = Names()
    with patch.object(socket, "getaddrinfo", answers.getaddrinfo):
        try:
            yield answers
        finally:
            answers.answering.set()
