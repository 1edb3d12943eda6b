"""The webhook: one POST to `console.webhook_url` for each change of the verdict.

A change counts once it has held for `console.webhook_after`, in two looks at the outbox at least. So nothing is sent of
what comes and goes. The receiver may be slow, away or hostile: nothing of its answer is read but the status.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import httpx
import orjson

from relay import __version__
from relay.config.settings import ConsoleSettings
from relay.console.place import Location
from relay.console.verdict import Mood, TheVerdict, Told
from relay.logger import get_logger
from relay.observe.printable import printable
from relay.runtime.backoff import Backoff
from relay.runtime.scrub import scrub

TICK = 1.0  # seconds between two looks at the verdict
TIMEOUT = 10.0  # seconds for an answer
AGAIN = Backoff(initial=1.0, maximum=60.0)
GIVE_UP_AFTER = 3600.0  # seconds in which a change is sent again
MOST_WAITING = 100  # changes; the oldest goes first
MOST_REASONS, MOST_CHARACTERS = 20, 500
# Chats read links and mentions in what stands left, and a reason may have the words of a stranger.
PLAIN = str.maketrans({"<": "(", ">": ")", "[": "(", "]": ")", "&": "+", "@": " at ", "`": "'"})

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """What is sent.

    Attributes:
        new: keys of the reasons that were not sent since the outbox was last ok.
        seen_at: as `at`, by a monotonic clock.
    """

    id: str
    at: datetime
    previous: Mood
    verdict: TheVerdict
    new: frozenset[str]
    seen_at: float = 0.0


class Changes:
    """Sees from look to look which change of the verdict has held.

    Args:
        after: seconds that it must hold.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._state = Mood.UNKNOWN
        self._sent: set[str] = set()  # keys of reasons, since the outbox was last ok
        self._since: dict[str, tuple[float, int]] = {}  # what holds, since when and which look

    def note(self, verdict: TheVerdict, *, look: int, now: float) -> Change | None:
        """Return the change that has held by now: of the state, or a reason of a new kind.

        Args:
            look: the number of the look at the outbox that the verdict rests on.
            now: seconds of a monotonic clock.
        """
        mood, keys = verdict.mood, {each.key for each in verdict.reasons}
        if mood is Mood.UNKNOWN:
            return None
        self._since = {each: self._since.get(each, (now, look)) for each in (mood, *keys)}
        held = {each for each, (at, seen) in self._since.items() if now - at >= self._after and look > seen}
        if mood not in held or (mood is self._state and held & keys <= self._sent):
            return None
        change = Change(str(uuid4()), datetime.now(UTC), self._state, verdict, frozenset(keys - self._sent), now)
        self._state = mood
        self._sent = set() if mood is Mood.OK else self._sent | keys
        return change


class Webhook:
    """Sends what has changed, in order, until it is taken.

    Args:
        look: returns the verdict now, and the number of the look that it rests on.
        place: returns where the console is.
    """

    def __init__(
        self, console: ConsoleSettings, look: Callable[[], tuple[TheVerdict, int]], place: Callable[[], Location]
    ) -> None:
        self._console = console
        self._look = look
        self._place = place
        self._waiting: deque[Change] = deque()
        self._has_more = asyncio.Event()
        self._failing = ""

    def failing(self) -> str:
        """Return why the receiver has not taken the latest try; empty when it has."""
        return self._failing

    async def run(self) -> None:
        """Send changes until cancelled; return at once where the settings name no receiver."""
        if not self._console.webhook_url.get_secret_value():
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="webhook:watch")
            tasks.create_task(self._send_all(), name="webhook:send")

    async def _watch(self) -> None:
        changes = Changes(self._console.webhook_after)
        while True:
            verdict, look = self._look()
            if (change := changes.note(verdict, look=look, now=time.monotonic())) is not None:
                self._waiting.append(change)
                if len(self._waiting) > MOST_WAITING:
                    self._give_up(self._waiting.popleft(), f"{MOST_WAITING} later changes wait")
                self._has_more.set()
            await asyncio.sleep(TICK)

    async def _send_all(self) -> None:
        while True:
            while self._waiting:
                await self._send(self._waiting[0])
            self._has_more.clear()
            await self._has_more.wait()

    async def _send(self, change: Change) -> None:
        """Send a change until it is taken, or given up."""
        tries = 0
        while self._waiting and self._waiting[0] is change:
            tries += 1
            reason = await self._try(change)
            self._failing = reason
            if not reason:
                self._waiting.popleft()
                log.info("console.webhook_sent", change=change.id, state=change.verdict.mood, tries=tries)
                return
            log.warning("console.webhook_failed", change=change.id, reason=reason, tries=tries)
            if time.monotonic() - change.seen_at >= GIVE_UP_AFTER:
                self._waiting.popleft()
                self._give_up(change, reason)
                return
            await asyncio.sleep(AGAIN.seconds(tries))

    async def _try(self, change: Change) -> str:
        """Return why the receiver did not take it; empty when it did."""
        url, token = (each.get_secret_value() for each in (self._console.webhook_url, self._console.webhook_token))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"outbox-relay/{__version__}",
            "Idempotency-Key": change.id,
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        body = orjson.dumps(document(change, self._place(), address_of(self._console)))
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                # By http, a proxy of the environment would read the token.
                httpx.AsyncClient(headers=headers, timeout=TIMEOUT, trust_env=url.startswith("https:")) as client,
                client.stream("POST", url, content=body) as answer,  # whose body nobody reads
            ):
                if answer.is_success:
                    return ""
                if answer.is_redirect:
                    return f"it answers {answer.status_code}, and no redirect is followed"
                return f"it answers {answer.status_code}"
        except TimeoutError:
            return f"no answer within {TIMEOUT:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # ValueError: a character in the token
            return printable(scrub(str(error) or type(error).__name__))[:MOST_CHARACTERS]

    def _give_up(self, change: Change, reason: str) -> None:
        log.error("console.webhook_given_up", change=change.id, state=change.verdict.mood, reason=reason)


def document(change: Change, place: Location, address: str) -> dict[str, Any]:
    """Return what is sent as JSON.

    Args:
        address: of the console, for links.
    """
    verdict = change.verdict
    told = verdict.reasons[:MOST_REASONS]
    return {
        "id": change.id,
        "time": change.at.isoformat(),
        "environment": place.environment,
        "database": place.database,
        "broker": place.broker,
        "state": verdict.mood,
        "previous_state": change.previous,
        "summary": _short(verdict.words),
        "reasons": [_reason(each, change, address) for each in told],
        "more_reasons": len(verdict.reasons) - len(told),
        "link": f"{address}/",
        "text": _text(verdict.words, told, place, address),
    }


def address_of(console: ConsoleSettings) -> str:
    """Return what stands before the paths of the pages."""
    return console.origin or f"http://{console.listen}"


def _reason(told: Told, change: Change, address: str) -> dict[str, Any]:
    return {
        "words": _short(told.words),
        "state": told.mood,
        "link": f"{address}{told.repair.path}" if told.repair else None,
        "is_new": told.key in change.new,
    }


def _text(words: str, told: Sequence[Told], place: Location, address: str) -> str:
    """Return a message for people, with no markup in it."""
    lines = [f"{place.name}: {_short(words)}", *(f"- {_short(each.words)}" for each in told), f"{address}/"]
    return "\n".join(line.translate(PLAIN) for line in lines)


def _short(words: str) -> str:
    words = printable(scrub(words))
    return words if len(words) <= MOST_CHARACTERS else f"{words[: MOST_CHARACTERS - 1]}…"
