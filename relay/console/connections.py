"""The connections of the console: bounded in number, and each request sent in time.

Without that, strangers who connect and say nothing take the console away from its users.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from relay.probes.server import share_of_descriptors

HEAD_TIMEOUT = 10.0  # seconds for a client to send all of a request but its body
MOST_CONNECTIONS = 500


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn's with a deadline; a new one takes the place of the oldest that still sends."""

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # loop time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > share_of_descriptors(MOST_CONNECTIONS):
            others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
            sending = [each for each in others if each.is_sending]
            (min(sending, key=lambda each: each._since) if sending else self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_sending(self) -> bool:
        """Whether its request is not complete, or has not begun."""
        return self.is_waiting or self.cycle.more_body

    def drop(self) -> None:
        self.transport.abort()

    def _watch(self) -> None:
        """Allow the client time for its request, counted from the connection or the first byte on."""
        if not self.is_waiting:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self.drop)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
