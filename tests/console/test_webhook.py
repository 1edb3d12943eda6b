"""The verdict leaves the house: one POST a change that holds, until the receiver has taken it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from pydantic import SecretStr, ValidationError

from relay.config.keys import as_json
from relay.config.settings import ConsoleSettings, Settings
from relay.console import checkup, webhook
from relay.console.place import Location
from relay.console.site import Site
from relay.console.verdict import Mood, Repair, TheVerdict, Told
from relay.console.webhook import Change, Changes, document
from relay.operate.runbooks import Runbook
from relay.runtime.backoff import Backoff
from relay.runtime.scrub import scrub
from tests.console.site import browser, running
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.webhook import Receiver, is_installed

TOKEN = "s3cret-of-the-receiver"
AFTER = 10.0
FRESH = -86_400.0  # seconds: the age of a heartbeat that stays fresh
OK, PARKED = (
    TheVerdict(Mood.OK, "All is well", []),
    Told("parked", "3 parked", Repair("/failures", "See"), Runbook.PARKED),
)
AMBER = TheVerdict(Mood.WARNING, "Something needs a look", [PARKED])
RED = TheVerdict(
    Mood.FAILED, "The database does not answer", [Told("database", "refused", None, Runbook.DATABASE_LOST, Mood.FAILED)]
)


class Watched:
    """Changes that see a verdict each second."""

    def __init__(self) -> None:
        self._changes = Changes(AFTER)
        self._now = 0.0

    def see(self, verdict: TheVerdict, seconds: int, *, look: int | None = None) -> list[tuple[Mood, Mood, set[str]]]:
        """Return what is sent while the verdict holds: the previous state, the state, and the new reasons."""
        found = []
        for _ in range(seconds):
            self._now += 1
            change = self._changes.note(verdict, look=int(self._now) if look is None else look, now=self._now)
            if change is not None:
                found.append((change.previous, change.verdict.mood, set(change.new)))
        return found


def test_a_change_that_holds_is_sent_once() -> None:
    watched = Watched()

    assert watched.see(OK, 60) == [(Mood.UNKNOWN, Mood.OK, set())]
    assert watched.see(AMBER, 10) == []
    assert watched.see(AMBER, 60) == [(Mood.OK, Mood.WARNING, {"parked"})]
    assert watched.see(RED, 60) == [(Mood.WARNING, Mood.FAILED, {"database"})]
    assert watched.see(OK, 60) == [(Mood.FAILED, Mood.OK, set())]


def test_what_comes_and_goes_is_not_sent() -> None:
    watched = Watched()
    watched.see(OK, 60)

    assert [watched.see(verdict, 8) for verdict in (AMBER, OK, RED, OK) * 10] == [[]] * 40


def test_a_new_kind_of_reason_is_sent_once_until_all_is_well() -> None:
    watched = Watched()
    watched.see(AMBER, 60)
    more = TheVerdict(
        Mood.WARNING,
        AMBER.words,
        [PARKED, Told("letters billing.dead", "1 dead letter", None, Runbook.CONSUMER_DEAD_LETTERS)],
    )
    other_number = TheVerdict(Mood.WARNING, AMBER.words, [Told("parked", "4 parked", None, Runbook.PARKED)])

    assert watched.see(more, 60) == [(Mood.WARNING, Mood.WARNING, {"letters billing.dead"})]
    assert [watched.see(each, 60) for each in (AMBER, more, other_number)] == [[], [], []]
    watched.see(OK, 60)
    assert watched.see(more, 60) == [(Mood.OK, Mood.WARNING, {"parked", "letters billing.dead"})]


def test_a_change_of_one_look_alone_is_not_sent() -> None:
    watched = Watched()
    watched.see(OK, 60)

    assert watched.see(RED, 60, look=61) == []
    assert watched.see(RED, 1, look=62) == [(Mood.OK, Mood.FAILED, {"database"})]


def test_what_is_sent_is_bounded_and_has_no_markup_for_a_chat() -> None:
    hostile = "<!channel> @all [here](http://evil.test) \x1b[31m" + "x" * 5000
    reasons = [Told(f"queue {number}", hostile, Repair("/routes", "See"), Runbook.ROUTE) for number in range(50)]
    change = Change("1", datetime.now(UTC), Mood.OK, TheVerdict(Mood.WARNING, "A look", reasons), frozenset())

    told = document(change, Location("prod", "shop on db", "mq/"), "https://relay.test/ops")

    assert len(orjson.dumps(told)) < 40_000
    assert (len(told["reasons"]), told["more_reasons"]) == (20, 30)
    assert told["reasons"][0]["link"] == "https://relay.test/ops/routes"
    assert not set("<>@[]\x1b") & set(told["text"])


@pytest.mark.parametrize(
    "url", ["ftp://a.test", "https://", "https://ada:pw@a.test/", "https://a.test/#x", "https://a.test/\n", "//a.test"]
)
def test_a_url_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ConsoleSettings.model_validate({"webhook_url": url})

    assert "a.test" not in str(refused.value.errors()[0]["msg"])


def test_the_url_is_shown_nowhere() -> None:
    console = ConsoleSettings(webhook_url=SecretStr("https://hooks.test/services/T0/B0/xyzzy"))

    assert "xyzzy" not in str(as_json(console)) + repr(console) + scrub("POST https://hooks.test/services/T0/B0/xyzzy")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look and try often, and leave the doctor's findings out."""
    monkeypatch.setattr(webhook, "TICK", 0.1)
    monkeypatch.setattr(webhook, "AGAIN", Backoff(initial=0.2, maximum=0.5))

    async def run(self: checkup.Checkup) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(checkup.Checkup, "run", run)


@pytest.mark.skipif(not is_installed(), reason="webhook is not installed; as root, `tests/support/packages test`")
async def test_a_receiver_gets_each_change_with_its_reason_and_link(settings: Settings, rows: Rows) -> None:
    rows.node(age=FRESH)
    with Receiver(TOKEN) as receiver:
        section = {
            "webhook_url": receiver.url,
            "webhook_token": TOKEN,
            "webhook_after": 0.5,
            "environment": "production",
        }
        async with running(settings, **section):
            await comes(lambda: states(receiver.received()), [("unknown", "ok")])
            rows.parked()
            await comes(lambda: states(receiver.received()), [("unknown", "ok"), ("ok", "warning")])
            receiver.stop()
            rows.connection.execute("DELETE FROM outbox.message")
            await asyncio.sleep(3)  # it tries, and nobody is there
            receiver.start()
            await comes(lambda: states(receiver.received()), [("unknown", "ok"), ("ok", "warning"), ("warning", "ok")])
        told = receiver.received()[1]

    assert (told["environment"], told["link"]) == ("production", "https://relay.test/")
    assert told["database"].startswith(f"{rows.connection.info.dbname} on 127.0.0.1")
    assert told["reasons"] == [
        {
            "words": "1 parked: see `relay parked list`",
            "state": "warning",
            "link": "https://relay.test/failures",
            "is_new": True,
        }
    ]
    assert told["text"].startswith("production: ")


def states(told: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the changes, each once: one comes again when its answer was lost."""
    once = {each["id"]: each for each in told}
    return [(each["previous_state"], each["state"]) for each in once.values()]


async def comes(look: Callable[[], list[tuple[str, str]]], wanted: list[tuple[str, str]]) -> None:
    await eventually(lambda: look() == wanted, f"the receiver has {wanted}", 60)


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Stranger:
    """A receiver that answers as it likes."""

    answer: Answer
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        self.headers.append(head)
        self.bodies.append(orjson.loads(await reader.readexactly(length)))
        try:
            await self.answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def stranger(answer: Answer) -> AsyncIterator[Stranger]:
    found = Stranger(answer)
    async with await asyncio.start_server(found.connected, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


def says(text: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(text.encode())
        await writer.drain()

    return answer


async def drips(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: 1\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def floods_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-More: ")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"), "it answers 500"),
        (
            says("HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
            "it answers 307, and no redirect is followed",
        ),
        (drips, "no answer within 1 s"),
        (floods_headers, "size exceeded|too large|Receive buffer too long"),
        (says("\x1b[31m <script>\r\n\r\n"), "illegal status line"),
        (says(""), "Server disconnected without sending a response"),
    ],
    ids=["500", "redirect", "slow", "endless header", "no HTTP", "nothing"],
)
async def test_a_receiver_that_does_not_take_it_is_asked_again_and_told_of(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, answer: Answer, reason: str
) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT", 1.0)
    async with stranger(answer) as receiver, console(settings, receiver) as app:
        site: Site = app.state.site
        await eventually(lambda: len(receiver.bodies) >= 2, "it is asked again", 60)
        said = site.webhook.failing()
        async with browser(app) as client:
            page = await client.get("/")
        receiver.answer = says("HTTP/1.1 204 Done\r\n\r\n")
        await eventually(lambda: not site.webhook.failing(), "it is taken", 60)
        taken = len(receiver.bodies)
        await asyncio.sleep(1)

    assert any(each in said for each in reason.split("|")), said
    assert "the receiver of console.webhook_url has not taken the latest change: " in page.text
    assert "<script>" not in page.text.partition("<body")[2]
    assert len({body["id"] for body in receiver.bodies}) == 1
    assert len(receiver.bodies) == taken
    assert f"authorization: bearer {TOKEN}" in receiver.headers[0].lower()


async def test_the_body_of_an_answer_is_not_read(settings: Settings) -> None:
    written = 0

    async def floods(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            written += 65536

    async with stranger(floods) as receiver, console(settings, receiver) as app:
        site: Site = app.state.site
        await eventually(lambda: bool(receiver.bodies) and not site.webhook.failing(), "it is taken", 60)
        await asyncio.sleep(1)

    assert len(receiver.bodies) == 1
    assert written < 16 * 1024 * 1024  # what the kernel takes


async def test_a_change_is_given_up_after_a_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "GIVE_UP_AFTER", 1.0)
    async with stranger(says("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")) as receiver, console(settings, receiver):
        await eventually(lambda: len(receiver.bodies) >= 2, "it is asked again", 60)
        await asyncio.sleep(3)
        tries = len(receiver.bodies)
        await asyncio.sleep(2)

    assert len(receiver.bodies) == tries


@asynccontextmanager
async def console(settings: Settings, receiver: Stranger) -> AsyncIterator[FastAPI]:
    section = {"webhook_url": f"http://127.0.0.1:{receiver.port}/", "webhook_token": TOKEN, "webhook_after": 0.5}
    async with running(settings, **section) as app:
        yield app
