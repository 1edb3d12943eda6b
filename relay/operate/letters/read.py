"""Look at dead letters, which stay where they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from shlex import quote

from relay.config.settings import BrokerSettings
from relay.errors import NotFoundError
from relay.operate.letters.letter import Held, Letter, LetterSelection
from relay.operate.letters.queue import PAGE, opened


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of a queue.

    Attributes:
        letters: in the queue, those that do not match included.
        matched: of those that were read; more may when `limit` has ended it.
        warning: what else an operator should know.
    """

    letters: int
    matched: int
    warning: str | None


async def read_letters(
    broker: BrokerSettings, queue: str, selection: LetterSelection, take: Callable[[Held], None]
) -> Read:
    """Call `take` with each letter of the queue that is meant, first to last; raises as `queue.opened`."""
    matched = 0
    limit = selection.limit
    async with opened(broker, queue) as dead:
        # Without a filter no more are disturbed than are asked for.
        size = min(PAGE, limit) if limit is not None and selection.is_everything else PAGE
        async for page in dead.pages(size):
            for each in page:
                if matched != limit and selection.matches(each.letter):
                    matched += 1
                    take(each)
            if matched == limit:
                break
    return Read(dead.count, matched, dead.refusal)


async def list_letters(broker: BrokerSettings, queue: str, selection: LetterSelection) -> tuple[list[Letter], Read]:
    """Return the letters that are meant, without their bodies."""
    letters: list[Letter] = []
    return letters, await read_letters(broker, queue, selection, lambda held: letters.append(held.letter))


@dataclass(frozen=True, slots=True)
class SeenLetters:
    """What is known of letters that may be thrown away."""

    matched: int
    oldest: datetime | None  # the last failure of that letter which failed first
    first: list[Letter]
    warning: str | None


async def look_through(broker: BrokerSettings, queue: str, selection: LetterSelection, *, first: int) -> SeenLetters:
    """Look at all letters that are meant, and keep the first so many: a queue may have a million."""
    letters: list[Letter] = []
    oldest: datetime | None = None

    def note(held: Held) -> None:
        nonlocal oldest
        letter = held.letter
        if len(letters) < first:
            letters.append(letter)
        oldest = min((each for each in (oldest, letter.last_failed_at) if each is not None), default=None)

    read = await read_letters(broker, queue, selection, note)
    return SeenLetters(read.matched, oldest, letters, read.warning)


def seen_of(letters: Sequence[Letter], *, matched: int, warning: str | None, first: int) -> SeenLetters:
    """Return what `look_through` does, of letters that were listed."""
    failed = [each.last_failed_at for each in letters if each.last_failed_at is not None]
    return SeenLetters(matched, min(failed, default=None), list(letters[:first]), warning)


async def count_letters(broker: BrokerSettings, queue: str) -> int:
    """Return how many letters a queue has that are with nobody, without reading one; raises as `queue.opened`."""
    async with opened(broker, queue) as dead:
        return dead.count


def list_command(queue: str) -> str:
    """Return the command that lists the letters of a queue, for a message."""
    return f"`relay dead-letters list {quote(queue)}`"


async def show_letter(broker: BrokerSettings, queue: str, message_id: str) -> Held:
    """Return the first letter of this id.

    Raises:
        NotFoundError: it is not there.
    """
    found: list[Held] = []
    await read_letters(broker, queue, LetterSelection(message_ids=frozenset({message_id}), limit=1), found.append)
    if not found:
        raise NotFoundError(f"no letter of {queue} has the message id {message_id}: see {list_command(queue)}")
    return found[0]
