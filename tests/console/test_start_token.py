"""Without authentication a console is for who has the token that it prints at its start, and for nobody else."""

import asyncio
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from relay.config.settings import Settings
from relay.console.access.start_token import StartToken
from tests.cli.command import Command
from tests.console.routes import routes
from tests.console.site import ORIGIN, browser, running, serving, stranger

OPEN = {
    "/login",
    "/login/provider",
    "/login/callback",
    "/logout",
    "/icon/{mood}.svg",
}  # they tell nothing, and change nothing
VISIT = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


async def enter(client: httpx.AsyncClient, start: StartToken) -> httpx.Response:
    return await client.get(start.address(ORIGIN))


async def test_nothing_is_answered_to_who_has_no_token(settings: Settings) -> None:
    async with running(settings) as app, stranger(app) as client:
        for route in routes(app):
            for method in sorted(route.methods or ()):
                answer = await client.request(method, route.path or "", headers={"Origin": ORIGIN})
                assert answer.status_code == 401 or route.path in OPEN, (method, route.path)


@pytest.mark.parametrize("path", ["/", "/messages", "/api/v1/status", "/live"])
async def test_the_answer_says_where_the_address_is_printed(settings: Settings, path: str) -> None:
    async with running(settings) as app, stranger(app) as client:
        answer = await client.get(path)

    assert answer.status_code == 401
    for words in ("open the address that", "relay console", "printed when it began", "RELAY_TOKEN"):
        assert words in answer.text


async def test_a_browser_that_brings_the_token_gets_a_cookie_and_the_address_without_it(settings: Settings) -> None:
    async with running(settings) as app, stranger(app) as client:
        entered = await enter(client, app.state.site.access.start)
        page = await client.get(entered.headers["Location"])
        change = await client.post("/routes/lanes/7/resume", headers={"Origin": "https://evil.test"})

    assert (entered.status_code, entered.headers["Location"]) == (303, "/")
    cookie, *attributes = entered.headers["Set-Cookie"].split("; ")
    assert cookie.startswith("__Host-relay=")
    assert {each.lower() for each in attributes} == {"httponly", "path=/", "samesite=strict", "secure"}
    assert entered.headers["Cache-Control"] == "no-store"
    assert page.status_code == 200
    assert (change.status_code, "does not come from a page" in change.text) == (403, True)


@pytest.mark.parametrize("token", ["", "x" * 43, "é", "\udc80", "part"], ids=ascii)
async def test_another_token_lets_nobody_in(settings: Settings, token: str) -> None:
    async with running(settings) as app, stranger(app) as client:
        known = app.state.site.access.start.address("").partition("=")[2]
        given = known[:-1] if token == "part" else token
        by_address = await client.get("/?token=" + "".join(f"%{byte:02x}" for byte in given.encode(errors="replace")))
        after = await client.get("/")
        bearer = b"Bearer " + given.encode(errors="surrogateescape")
        by_header = await client.get("/api/v1/status", headers=[(b"Authorization", bearer)])
        with_other_names = [await client.get(f"{path}?token={known}") for path in ("/messages", "/api/v1/status")]

    answers = (by_address, after, by_header, *with_other_names)
    assert [answer.status_code for answer in answers] == [401] * len(answers)


async def test_a_program_sends_the_token_as_a_header(settings: Settings) -> None:
    async with running(settings) as app, stranger(app) as client:
        token = app.state.site.access.start.address("").partition("=")[2]
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": str(uuid4())}
        read = await client.get("/api/v1/status", headers=headers)
        written = await client.post("/api/v1/quarantine/probe", headers=headers, json={})

    assert (read.status_code, written.status_code) == (200, 200)


async def test_a_command_sends_the_token_from_its_variable(settings: Settings, tmp_path: Path) -> None:
    relay = Command(tmp_path)
    async with serving(settings) as address:
        asked = ("--server", address, "status")
        done = await asyncio.to_thread(lambda: relay.process(*asked, RELAY_TOKEN=address.token))
        refused = await asyncio.to_thread(lambda: relay.process(*asked, RELAY_TOKEN="x" * 43))

    assert done.code == 0
    assert (refused.code, "open the address that `relay console` printed" in refused.err) == (1, True)


async def test_each_start_has_another_token(settings: Settings) -> None:
    async with running(settings) as one, running(settings) as other, stranger(other) as client:
        entered = await enter(client, one.state.site.access.start)

    assert entered.status_code == 401


async def test_a_session_lasts_as_long_as_the_token(settings: Settings) -> None:
    async with running(settings, session_timeout=0.001) as app, browser(app) as client:
        assert (await client.get("/nodes")).status_code == 200


async def test_a_link_of_another_site_is_opened_with_the_cookie(settings: Settings) -> None:
    """The browser does not send the cookie with a request that another site caused; a page of ours asks again."""
    async with running(settings) as app, stranger(app) as client:
        answer = await client.get("/failures", headers=VISIT)

    assert answer.status_code == 200
    assert "0; url=/failures" in answer.text
    assert "Set-Cookie" not in answer.headers
