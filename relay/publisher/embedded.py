"""A relay in the publisher's process, for deployments without `relay run`."""

import asyncio
from collections.abc import Sequence

import psycopg

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.errors import OutboxError, leaves
from relay.logger import get_logger
from relay.runtime.backoff import backoff, wait_for_event

log = get_logger(__name__)

RESTART_INITIAL, RESTART_MAX = 0.5, 10.0  # seconds


class EmbeddedRelay:
    """Runs a node, and starts it again when it fails; meanwhile the application and the direct way go on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._node: Node | None = None
        self._stopped = asyncio.Event()
        self._failure = ""

    @property
    def reasons(self) -> Sequence[str]:
        hindrances = self._node.hindrances() if self._node is not None else {}
        reasons = [f"relay: {part}: {reason}" for part, reason in hindrances.items()]
        return [f"relay: {self._failure}"] if self._failure else reasons

    async def run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            self._node = Node(self._settings)
            try:
                await self._node.run()
            except* Exception as group:
                self._failure = "; ".join(str(error) for error in leaves(group))
                failures += 1
                _, fault = group.split((OutboxError, psycopg.Error))
                log.error("relay.failed", reason=self._failure, exc_info=fault)
            else:
                return
            await wait_for_event(self._stopped, backoff(failures, RESTART_INITIAL, RESTART_MAX))
            self._failure = ""

    def stop(self) -> None:
        self._stopped.set()
        if self._node is not None:
            self._node.start_draining()
