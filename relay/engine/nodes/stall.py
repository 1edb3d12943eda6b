"""Notice outages that no connection reports: waiting messages do not settle, or the database does not answer.

The watch looks once a second at counters that the engine keeps anyway, so a message costs nothing. The object that
holds a connection reports its outages at once. The watch notices a peer that only falls silent, long before a time-out
ends the connection.
"""

import asyncio
import time
from collections.abc import Callable

from relay.config.settings import RelaySettings
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from relay.engine.settle.mark import Delivered
from relay.runtime.backoff import until_tick
from relay.runtime.health import Health
from relay.runtime.silence import StallTimer

LOOK_INTERVAL = 1.0  # seconds
SESSION_SETTLES = 2.0  # seconds after which a new session has read again what waits


class StallWatch:
    """Watches a node.

    Args:
        session: returns the session that the node works with; None between two sessions.
    """

    def __init__(
        self,
        sender: Sender,
        delivered: Delivered,
        health: Health,
        settings: RelaySettings,
        *,
        session: Callable[[], LaneSession | None],
    ) -> None:
        self._sender = sender
        self._delivered = delivered
        self._health = health
        self._timer = StallTimer(settings.stall_after)
        self._answers_within = settings.stall_after + settings.heartbeat_interval
        self._session = session
        self._watched: LaneSession | None = None
        self._waiting = 0
        self._is_empty = False  # nothing waited at the last look
        self._heard_at = 0.0
        self._is_silent = False
        self._session_at = self._answered_at = time.monotonic()
        self._timer.restart(self._session_at)

    async def run(self) -> None:
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(until_tick(LOOK_INTERVAL))

    def look(self, now: float) -> None:
        session = self._session()
        if session is not self._watched:
            self._watched, self._session_at, self._answered_at = session, now, now
        self._look_at_database(now)
        self._look_at_delivery(now)

    def _look_at_database(self, now: float) -> None:
        # Each heartbeat is a write, so an idle session answers too. While another relay has its name, it only asks.
        session = self._watched
        heard_at = (session.written_at or session.answered_at) if session else 0.0
        if session is None or heard_at != self._heard_at:
            self._heard_at = heard_at
            self._answered_at = now
        if now - self._answered_at > self._answers_within:
            self._is_silent = True
            self._health.degrade("database", f"it has not answered for more than {self._answers_within:g} s")
        elif self._is_silent:
            self._is_silent = False
            if session is not None:  # otherwise the session was lost, and the node has reported that
                self._health.heal("database")

    def _look_at_delivery(self, now: float) -> None:
        waiting = self._sender.waiting
        # A lost session takes the rows out of memory, not out of the table: they still wait. And for a moment nothing
        # waits between the time-out of the confirms, which quarantines a route, and the probe of that route.
        if waiting or (self._is_empty and self._watched is not None and now - self._session_at > SESSION_SETTLES):
            self._waiting = waiting
        self._is_empty = not waiting
        seconds = self._timer.look(self._delivered.total, self._waiting, now)
        if seconds is None:
            self._health.move()
        else:
            self._health.stall(self._waiting, seconds)
