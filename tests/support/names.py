"""Names that this process resolves as a test says."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest.mock import patch


class Names(dict[str, list[str]]):
    """The addresses of each name; every other name is resolved as usual.

    Attributes:
        answering: while it is cleared, nobody gets an answer.
        asked: how often one of the names was resolved.
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
    """Resolve the names that are added meanwhile."""
    answers = Names()
    with patch.object(socket, "getaddrinfo", answers.getaddrinfo):
        try:
            yield answers
        finally:
            answers.answering.set()
