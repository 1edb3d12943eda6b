"""Who has not logged in costs the console little, and takes it away from nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from relay.config.settings import Settings
from relay.console import connections
from relay.console.access import bounds
from relay.console.pages import overview
from relay.operate.operation import Role
from tests.console.api.program import tokens
from tests.console.site import browser, running, serving, users

POST = "POST /api/v1/parked/retry HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(address: str, *parts: str) -> str:
    """Return what is answered to a request that is sent in parts, and goes no further."""
    async with connected(address) as (reader, writer):
        for part in parts:
            writer.write(part.replace("{host}", urlsplit(address).netloc).encode())
            await writer.drain()
        return (await asyncio.wait_for(reader.read(), 60)).decode()


async def is_up(address: str) -> bool:
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        return (await client.get("/login")).status_code == 200


async def test_many_who_say_nothing_do_not_take_the_console_away(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 20)
    async with serving(settings, **users(tmp_path)) as address, AsyncExitStack() as strangers:
        first, _ = await strangers.enter_async_context(connected(address))
        for _ in range(60):
            await strangers.enter_async_context(connected(address))

        assert await is_up(address)
        assert await asyncio.wait_for(first.read(), 60) == b""


@pytest.mark.parametrize(
    "sent", ["", "GET / HTTP/1.1\r\nHost: {host}\r\n", "GET /login HTTP/1.1\r\nHost: {host}\r\n\r\nG"]
)
async def test_who_does_not_say_all_is_dropped(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.2)
    async with serving(settings, **users(tmp_path)) as address:
        assert (await answer(address, sent)).startswith("HTTP/1.1 200" if sent.endswith("G") else "")


async def test_a_body_that_does_not_come_is_not_waited_for(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "BODY_TIMEOUT", 0.2)
    token = f"Authorization: Bearer {tokens(tmp_path)[Role.OWNER]}\r\n"
    async with serving(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as address:
        told = await answer(address, f"{POST}{token}Content-Length: 100\r\n\r\n", '{"all": ')

    assert told.startswith("HTTP/1.1 408")


async def test_nothing_is_read_from_who_has_no_token(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, **users(tmp_path)) as address:
        announced = await answer(address, f"{POST}Content-Length: 1000\r\n\r\n")
        chunked = await answer(address, f"{POST}Transfer-Encoding: chunked\r\n\r\n", "5\r\n{not \r\n")

    for told in (announced, chunked):
        assert told.startswith("HTTP/1.1 401")
        assert "connection: close" in told.lower()


@pytest.mark.parametrize("length", ["1048577", "9" * 18])
async def test_a_body_that_is_announced_too_long_is_not_read(settings: Settings, tmp_path: Path, length: str) -> None:
    token = f"Authorization: Bearer {tokens(tmp_path)[Role.OWNER]}\r\n"
    async with serving(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as address:
        told = await answer(address, f"{POST}{token}Content-Length: {length}\r\n\r\n")

    assert told.startswith("HTTP/1.1 413")


async def test_a_refusal_is_read_by_a_client_that_is_still_sending(settings: Settings, tmp_path: Path) -> None:
    login = "POST /login HTTP/1.1\r\nHost: {host}\r\nContent-Length: 200000\r\n\r\n"
    async with serving(settings, **users(tmp_path)) as address:
        told = await answer(address, login, *["x" * 10_000] * 20)

    assert told.startswith("HTTP/1.1 413")


async def test_a_refused_client_that_sends_without_an_end_is_left(settings: Settings, tmp_path: Path) -> None:
    login = "POST /login HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99999999\r\n\r\n"
    async with serving(settings, **users(tmp_path)) as address, connected(address) as (_, writer):
        writer.write(login.replace("{host}", urlsplit(address).netloc).encode())
        with pytest.raises(ConnectionError):
            await _send_for_ever(writer)


async def _send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


async def test_a_body_without_a_length_is_read_as_far_as_it_may_be(settings: Settings, tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 64 * 1024

    token = {"Authorization": f"Bearer {tokens(tmp_path)[Role.OWNER]}", "Content-Type": "application/json"}
    async with running(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as app, browser(app) as client:
        told = await client.post("/api/v1/parked/retry", content=endless(), headers=token)

    assert told.status_code == 413


async def test_a_login_in_parts_is_refused(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        told = await client.post("/login", data={"name": "a"}, files={"password": b"x"})
        long = await client.post("/login", data={"name": "a" * 20_000, "password": "x"})

    assert (told.status_code, long.status_code) == (415, 413)


async def test_a_page_of_a_fault_has_the_headers_of_every_page(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(overview, "page", fail)
    async with running(settings) as app, browser(app) as client:
        told = await client.get("/")

    assert told.status_code == 500
    assert "default-src 'none'" in told.headers["Content-Security-Policy"]
    assert told.headers["Cache-Control"] == "no-store"
