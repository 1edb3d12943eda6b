"""Who works on what: whoever is free takes what has waited longest, and no two have messages of one key.

Not by a hash of the key: with as many deliveries as workers, of which some always meet in one worker, the others idle
(docs/decisions/0017-keys-to-whoever-is-free.md).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from relay.consume.hindrances import Stopping
from relay.consume.message import Delivery


class KeyQueue:
    """Deliveries that wait for a worker, in the order in which they came, by key."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Delivery]] = {}  # of every key that waits or is worked on
        self._free: asyncio.Queue[str | None] = asyncio.Queue()  # keys that wait and nobody works on; None: `stop`
        self._is_stopped = False

    def put(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(delivery.key)
        if waiting is None:
            self._waiting[delivery.key] = deque([delivery])
            self._free.put_nowait(delivery.key)
        else:
            waiting.append(delivery)

    async def take(self, most: int) -> list[Delivery]:
        """Wait for deliveries, and take at most so many, in the order in which they came.

        No other worker gets one of their keys before they are handed to `done`.

        Raises:
            Stopping: `stop` was called.
        """
        batch: list[Delivery] = []
        key = await self._free.get()
        while key is not None:
            waiting = self._waiting[key]
            while waiting and len(batch) < most:
                batch.append(waiting.popleft())
            if len(batch) == most or self._free.empty():
                break
            key = self._free.get_nowait()
        if self._is_stopped:
            self._free.put_nowait(None)  # lets the next one go
            raise Stopping
        if len(batch) > 1:
            batch.sort(key=lambda delivery: delivery.tag)
        return batch

    def give_back(self, batch: Sequence[Delivery]) -> None:
        """Put what was taken, or some of it, in front of its keys again, in its order; `done` is still to be called."""
        for delivery in reversed(batch):
            self._waiting[delivery.key].appendleft(delivery)

    def done(self, batch: Iterable[Delivery]) -> None:
        """Let others have the keys of a batch."""
        for key in {delivery.key for delivery in batch}:
            if self._waiting[key]:
                self._free.put_nowait(key)
            else:
                del self._waiting[key]

    def stop(self) -> None:
        """Let all who wait in `take` go."""
        self._is_stopped = True
        self._free.put_nowait(None)
