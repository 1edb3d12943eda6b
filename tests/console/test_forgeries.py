"""No page of another site makes a browser change anything in the console.

Each forgery differs in one or two things from a request that is taken. The routes are those of the app, so that no
route can be forgotten; the tables and a queue are compared before and after.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aio_pika
import httpx
import pytest
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console.access.cookie import NAME, new_browser
from relay.console.access.writes import ALWAYS
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.routes import PARAMETER, routes, writes
from tests.console.site import ORIGIN, browser, log_in, running, users
from tests.console.unchanged import everything

EVIL = "https://evil.test"
QUEUE = "billing.dead"
FORM_TYPE, JSON_TYPE, TEXT_TYPE = "application/x-www-form-urlencoded", "application/json", "text/plain"
REFUSED = {401, 403, 415, 421}
LEFT_OUT = object()  # a header that is not sent
# What the forms and the API take; each route takes what it knows, the others say so.
WORDS = {
    "why": "test", "kind": "retry", "queue": QUEUE, "lane": "7", "exchange": "", "routing_key": "later", "rate": "1",
    "name": "owner", "password": "x",
}  # fmt: skip
PROXY = {"authentication": "proxy", "trusted_proxies": "10.0.0.1", "owner_groups": "sre"}
NAMED = {"X-Forwarded-User": "ada", "X-Forwarded-Groups": "sre"}


@dataclass(frozen=True, slots=True)
class Session:
    """What a browser has that may change everything."""

    client: httpx.AsyncClient
    cookie: str
    named: dict[str, str]  # headers of a proxy


@dataclass(frozen=True, slots=True)
class Forgery:
    """How a request differs from one that is taken.

    Attributes:
        headers: in place of those of a browser on a page of ours.
        cookie: whose cookie is sent.
        kind: Content-Type of the body; None is what the route takes.
    """

    headers: dict[str, Any] = field(default_factory=dict)
    cookie: Callable[[Session], str] = lambda session: session.cookie
    kind: str | None = None


FORGERIES = {
    "no origin": Forgery({"Origin": LEFT_OUT}),
    "the origin of another site": Forgery({"Origin": EVIL}),
    "no site as origin": Forgery({"Origin": "null"}),
    "our origin without encryption": Forgery({"Origin": ORIGIN.replace("https", "http")}),
    "an origin that begins like ours": Forgery({"Origin": f"{ORIGIN}.evil.test"}),
    "an origin that ends like ours": Forgery({"Origin": ORIGIN.replace("//", "//evil-")}),
    "our origin in capitals": Forgery({"Origin": ORIGIN.upper()}),
    "our origin at another port": Forgery({"Origin": f"{ORIGIN}:8443"}),
    "ours and another origin": Forgery({"Origin": f"{ORIGIN}, {EVIL}"}),
    "an empty origin": Forgery({"Origin": ""}),
    "a referer of another site alone": Forgery({"Origin": LEFT_OUT, "Referer": f"{EVIL}/"}),
    "our referer in place of an origin": Forgery({"Origin": LEFT_OUT, "Referer": f"{ORIGIN}/"}),
    "a fetch for another site": Forgery({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}),
    "a fetch for a site next to ours": Forgery({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}),
    "a form of another site": Forgery(
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    ),
    "another host": Forgery({"Host": "evil.test"}),
    "no cookie": Forgery(cookie=lambda _: ""),
    "a cookie of another site's making": Forgery({"Origin": EVIL}, cookie=lambda _: new_browser()),
    "a cookie that is none of ours": Forgery(cookie=lambda _: "x"),
    "a form in parts": Forgery(kind="multipart/form-data; boundary=x"),
    "plain text and another origin": Forgery({"Origin": EVIL}, kind=TEXT_TYPE),
    "no content type": Forgery({"Origin": LEFT_OUT}, kind=""),
    "a method that is said to be another": Forgery({"Origin": LEFT_OUT, "X-HTTP-Method-Override": "GET"}),
    "a token of no program": Forgery({"Origin": EVIL, "Authorization": "Bearer x"}),
    "an empty token of a program": Forgery({"Origin": EVIL, "Authorization": "Bearer"}),
    "a password in place of a token": Forgery({"Origin": EVIL, "Authorization": "Basic b3duZXI6eA=="}),
    "the name of another host before the proxy": Forgery({"Origin": EVIL, "X-Forwarded-Host": "evil.test"}),
}


def request_of(session: Session, method: str, path: str, forgery: Forgery, query: str) -> httpx.Request:
    """Return the request of a route with what is forged."""
    is_page = not path.startswith("/api/")
    kind = (FORM_TYPE if is_page else JSON_TYPE) if forgery.kind is None else forgery.kind
    headers: dict[str, Any] = {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin", **session.named}
    if kind:
        headers["Content-Type"] = kind
    if not is_page:
        headers["Idempotency-Key"] = "forged"
    if cookie := forgery.cookie(session):
        headers["Cookie"] = f"{NAME}={cookie}"
    headers |= forgery.headers
    sent = {name: value for name, value in headers.items() if value is not LEFT_OUT}
    session.client.cookies.clear()  # an answer may have brought one
    return session.client.build_request(method, path + query, headers=sent, content=body_of(kind, is_page))


def body_of(kind: str, is_page: bool) -> str:
    if kind.startswith("multipart/"):
        head = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
        return "".join(head.format(*each) for each in WORDS.items()) + "--x--"
    return urlencode(WORDS) if is_page else json.dumps({"all": True, "why": "test"})


@asynccontextmanager
async def console(settings: Settings, folder: Path, kind: str) -> AsyncIterator[tuple[FastAPI, Session]]:
    """Yield a console with this authentication, and a browser of it that may change everything."""
    section = {"none": {}, "proxy": PROXY, "password": users(folder)}[kind]
    named = NAMED if kind == "proxy" else {}
    async with (
        running(settings, **section, tokens="") as app,
        browser(app, address="10.0.0.1" if kind == "proxy" else "127.0.0.1") as client,
    ):
        if kind == "password":
            await log_in(client, Role.OWNER)
        else:
            await client.get("/", headers=named)
        session = Session(client, client.cookies[NAME], named)
        client.cookies.clear()  # each request says which it sends
        yield app, session


@pytest.fixture
async def queue(broker_url: str) -> AsyncIterator[aio_pika.abc.AbstractQueue]:
    """A queue of dead letters with one in it."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        await channel.default_exchange.publish(aio_pika.Message(b"{}", message_id="1"), QUEUE)
        yield queue


async def state_of(url: str, queue: aio_pika.abc.AbstractQueue) -> dict[str, str]:
    letters = (await queue.declare()).message_count
    return {**await asyncio.to_thread(everything, url), QUEUE: str(letters)}


@pytest.mark.parametrize("kind", ["password", "proxy", "none"])
async def test_what_another_site_can_send_changes_nothing(
    settings: Settings, tmp_path: Path, database_url: str, queue: aio_pika.abc.AbstractQueue, kind: str
) -> None:
    fill(database_url)
    async with console(settings, tmp_path, kind) as (app, session):
        before = await state_of(database_url, queue)
        forged = {
            (name, path): (await sent(session, method, path, forgery)).status_code
            for method, path, _ in writes(app)
            for name, forgery in FORGERIES.items()
        }
        after = await state_of(database_url, queue)
        # With nothing forged they get past all these doors: so it was the forgery that was refused.
        honest = {path: (await sent(session, method, path, Forgery())).status_code for method, path, _ in _others(app)}
        changed = await state_of(database_url, queue)

    assert {each: status for each, status in forged.items() if status not in REFUSED} == {}
    assert after == before
    assert {path: status for path, status in honest.items() if status in REFUSED} == {}
    assert changed != before


def _others(app: FastAPI) -> list[tuple[str, str, Role | None]]:
    """Return what changes something but the login, whose password is wrong here, and its end."""
    return [each for each in writes(app) if each[1] not in ALWAYS]


async def test_a_method_is_what_the_request_line_says(
    settings: Settings, tmp_path: Path, database_url: str, queue: aio_pika.abc.AbstractQueue
) -> None:
    said = Forgery({"X-HTTP-Method-Override": "POST", "X-HTTP-Method": "POST", "X-Method-Override": "POST"})
    fill(database_url)
    async with console(settings, tmp_path, "password") as (app, session):
        before = await state_of(database_url, queue)
        answers = {
            (method, path): (await sent(session, method, path, said, query="?_method=POST")).status_code
            for _, path, _ in writes(app)
            for method in ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE")
        }
        after = await state_of(database_url, queue)
        reading = {PARAMETER.sub("1", route.path or "") for route in routes(app) if "GET" in (route.methods or ())}

    assert after == before
    assert {each for each, status in answers.items() if status < 400} <= {("GET", path) for path in reading}
    assert max(answers.values()) < 500


async def sent(session: Session, method: str, path: str, forgery: Forgery, *, query: str = "") -> httpx.Response:
    return await session.client.send(request_of(session, method, path, forgery, query))
