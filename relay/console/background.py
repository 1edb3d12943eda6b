"""Tasks that live as long as the console: one that fails begins again, and the first page says so."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from relay.logger import get_logger

AGAIN = 5.0  # seconds
SHOWN = 60.0  # seconds that the first page tells of an error

log = get_logger(__name__)


class Background:
    """Keeps tasks running, and knows which have failed of late."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}  # task -> monotonic

    async def keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a task until it returns or is cancelled."""
        while True:
            try:
                await run()
            except Exception as error:  # it begins again
                self.note(name, error)
            else:
                return
            await asyncio.sleep(AGAIN)

    def note(self, name: str, error: Exception) -> None:
        """Note an error that nobody has foreseen."""
        log.error("console.task_failed", task=name, exc_info=error)
        self._failed_at[name] = time.monotonic()

    def failing(self) -> list[str]:
        """Return the tasks that have failed of late."""
        return [name for name, at in self._failed_at.items() if time.monotonic() - at < SHOWN]
