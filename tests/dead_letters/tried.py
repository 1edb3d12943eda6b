"""A consumer of letters that are sent back, which gives some of them up again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from aio_pika.abc import AbstractIncomingMessage

from tests.dead_letters.changes import Audit
from tests.dead_letters.letters import FAILED_AT, Letters

LATER = FAILED_AT + timedelta(seconds=60)


@dataclass
class Tried:
    """What a consumer was given, and the state of the job by then."""

    ids: list[str | None] = field(default_factory=list)
    stages: list[tuple[int, int]] = field(default_factory=list)  # how many it had tried, and stages that had ended


async def nothing() -> None:
    return


@asynccontextmanager
async def consuming(
    letters: Letters,
    audit: Audit,
    *,
    fails: Callable[[str | None], bool] = lambda _: False,
    after: float = 0,
    does: Callable[[], Awaitable[None]] = nothing,
) -> AsyncIterator[Tried]:
    """Consume what is sent back, and give some of it up again, so many seconds later."""
    tried = Tried()

    async def take(message: AbstractIncomingMessage) -> None:
        row = audit.execute("SELECT max(stage) AS stage FROM outbox.job").fetchone()
        tried.stages.append((len(tried.ids), row["stage"] if row else 0))
        tried.ids.append(message.message_id)
        await does()
        if fails(message.message_id):
            await asyncio.sleep(after)
            await letters.put(message_id=message.message_id, failed_at=LATER)
        await message.ack()

    queue = await letters.queue.channel.get_queue(letters.queue.name)
    consumer = await queue.consume(take)
    yield tried
    await queue.cancel(consumer)
