"""What dead letters say, looked at when an operator asks, in the background: a queue has no index.

A look takes letters out of their queue for a moment, and the queue counts that they came back. So only an operator
begins a look. A queue has at most one at a time, and it ends after some letters or seconds. What came back often has
to be written again, and all that is behind it (relay/operate/letters/queue.py): in a long queue there is no look.
"""

import asyncio
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from relay.config.settings import BrokerSettings
from relay.errors import OutboxError
from relay.logger import get_logger
from relay.operate.failures import Group, group_letters
from relay.operate.letters.letter import Letter
from relay.operate.letters.queue import MOST_RETURNS, opened, returns_of
from relay.operate.letters.read import list_command
from relay.runtime.scrub import scrub

MOST_LETTERS = 10_000  # that a look reads
MOST_SECONDS = 20.0  # that it reads for
FIRST = 20  # letters of a group that are kept
MOST_QUEUES = 50  # whose latest looks are kept
AT_ONCE = 2  # looks
OFTEN = f"its first letters came back {MOST_RETURNS} times: another look would write"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a queue saw.

    Attributes:
        letters: in the queue.
        read: of these.
        first: the first letters of each group, by its id.
        group_of: the group of each letter that has a message id, by that.
        returns: how often these letters have come back.
        warning: why letters may be dropped by a delivery limit of their queue.
        error: why nothing was seen.
    """

    queue: str
    at: datetime
    letters: int = 0
    read: int = 0
    groups: tuple[Group, ...] = ()
    first: dict[str, list[Letter]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    returns: int = 0
    warning: str | None = None
    error: str | None = None


class Looks:
    """The latest look at each queue that an operator has asked for; memory alone has them."""

    def __init__(self, broker: BrokerSettings) -> None:
        self._broker = broker
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._room = asyncio.Semaphore(AT_ONCE)
        self.latest: dict[str, Look] = {}
        self.running: set[str] = set()

    def begin(self, queue: str) -> None:
        """Look at a queue of dead letters, unless that is being done. Call it in the event loop."""
        if queue not in self.running:
            self.running.add(queue)
            self._wanted.put_nowait(queue)

    def of_message(self, message_id: str) -> list[tuple[Look, Group]]:
        """Return the latest looks that saw the dead letter of a message, with its group."""
        return [
            (look, group)
            for look in [*self.latest.values()]
            for group in look.groups
            if group.id == look.group_of.get(message_id)
        ]

    async def run(self) -> None:
        """Look as asked, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                queue = await self._wanted.get()
                tasks.create_task(self._keep(queue), name=f"look:{queue}")

    async def _keep(self, queue: str) -> None:
        try:
            async with self._room:
                look = await self._look(queue)
            self.latest.pop(queue, None)  # so that the oldest is the first
            self.latest[queue] = look
            while len(self.latest) > MOST_QUEUES:
                self.latest.pop(next(iter(self.latest)))
        finally:
            self.running.discard(queue)

    async def _look(self, queue: str) -> Look:
        letters: list[Letter] = []
        returns = 0
        known = self.latest.get(queue)
        ends = time.monotonic() + MOST_SECONDS
        try:
            async with opened(self._broker, queue) as dead:
                if known and known.returns >= MOST_RETURNS and dead.count > MOST_LETTERS:
                    return replace(known, error=f"{OFTEN} {dead.count:,} letters again, as {list_command(queue)} does")
                async for page in dead.pages():
                    returns = max(returns, *map(returns_of, page))
                    letters += [each.letter for each in page]
                    if len(letters) >= MOST_LETTERS or time.monotonic() >= ends:
                        break
        except OutboxError as error:
            return Look(queue, datetime.now(UTC), error=scrub(str(error)))
        except Exception as error:  # the next look may go well
            log.error("console.look_failed", exc_info=error)
            return Look(queue, datetime.now(UTC), error="a fault of the console: see its log")
        first: dict[str, list[Letter]] = {}
        for letter in letters:
            if len(kept := first.setdefault(letter.group, [])) < FIRST:
                kept.append(letter)
        return Look(
            queue,
            datetime.now(UTC),
            letters=dead.count,
            read=len(letters),
            groups=tuple(group_letters(letters, queue)),
            first=first,
            group_of={letter.message_id: letter.group for letter in letters if letter.message_id},
            returns=returns + 1 if returns < MOST_RETURNS else 0,  # else copies have replaced them
            warning=dead.refusal,
        )
