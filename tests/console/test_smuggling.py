"""Bytes that two servers may read in two ways get one answer, and a request by another name gets no page.

A proxy in front of the console may take for a body what the console takes for the next request. That request would go
past what the proxy checks, with the session of the next user on the connection.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.site import serving, session_cookie, users
from tests.console.unchanged import everything
from tests.support.smuggling import SMUGGLED, smuggled

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
SILENCE = 0.4  # seconds without an answer, where the connection stays open
SPOOFED = "X-Forwarded-Host: evil.test\r\nX-Forwarded-Proto: https\r\nForwarded: for=1.1.1.1;host=evil.test\r\n"
HTTP_2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def answers(address: str, sent: bytes) -> tuple[list[int], bytes]:
    """Return the statuses of all answers to these bytes, and the answers."""
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(sent)
    told = b""
    try:
        while data := await asyncio.wait_for(reader.read(65536), SILENCE if told else 30):
            told += data
    except (TimeoutError, ConnectionResetError):
        pass
    finally:
        writer.close()
    return [int(status) for status in STATUS.findall(told)], told


async def test_what_is_smuggled_behind_a_request_is_not_done(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    fill(database_url)
    async with serving(settings, **users(tmp_path)) as address:
        second = await pause(address)
        before = everything(database_url)
        told = {
            name: (await answers(address, smuggled(name, "/login", urlsplit(address).netloc, second)))[0]
            for name in SMUGGLED
        }
        after = everything(database_url)
        honest, _ = await answers(address, second.encode())

    assert {name: statuses for name, statuses in told.items() if len(statuses) != 1 or statuses[0] >= 500} == {}
    assert told["length and chunks"] == [400]
    assert after == before
    assert honest == [303]


async def pause(address: str) -> str:
    """Return a request by which an owner pauses a lane."""
    cookie = await session_cookie(address, Role.OWNER)
    form = "lane=7&why=smuggled"
    head = f"POST /routes/lanes/pause HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\nOrigin: {address}\r\n"
    return (
        f"{head}Cookie: {cookie}\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        f"Content-Length: {len(form)}\r\n\r\n{form}"
    )


@pytest.fixture
async def address(settings: Settings, tmp_path: Path) -> AsyncIterator[str]:
    async with serving(settings, **users(tmp_path)) as address:
        yield address


async def test_a_name_that_is_not_ours_is_told_nothing(address: str) -> None:
    ours = urlsplit(address).netloc
    tried = [
        "GET /login HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "GET /login HTTP/1.1\r\nHost:\r\n\r\n",
        "GET /login HTTP/1.0\r\n\r\n",
        f"GET /login HTTP/1.1\r\nHost: {ours}.evil.test\r\n\r\n",
        f"GET /login HTTP/1.1\r\nHost: {ours}@evil.test\r\n\r\n",
        f"GET /login HTTP/1.1\r\nHost: {ours}, evil.test\r\n\r\n",
        f"GET /login HTTP/1.1\r\nHost: {ours.partition(':')[0]}:1\r\n\r\n",
        f"GET http://{ours}/login HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        f"GET /login HTTP/1.1\r\nHost: evil.test\r\nX-Forwarded-Host: {ours}\r\nForwarded: host={ours}\r\n\r\n",
    ]
    told = {sent: await answers(address, sent.encode()) for sent in tried}

    assert {sent: statuses for sent, (statuses, _) in told.items() if statuses != [421]} == {}
    assert [sent for sent, (_, answer) in told.items() if b"Set-Cookie" in answer or b"<form" in answer] == []


async def test_a_proxy_that_is_not_trusted_says_nothing_that_counts(address: str) -> None:
    ours = urlsplit(address).netloc
    login = await answers(address, f"GET /login HTTP/1.1\r\nHost: {ours}\r\n{SPOOFED}\r\n".encode())
    page = await answers(address, f"GET /messages HTTP/1.1\r\nHost: {ours}\r\n{SPOOFED}\r\n".encode())
    other = await answers(address, f"GET http://evil.test/login HTTP/1.1\r\nHost: {ours}\r\n\r\n".encode())

    assert [statuses for statuses, _ in (login, page, other)] == [[200], [303], [404]]
    assert b"\r\nlocation: /login?next=%2Fmessages\r\n" in page[1].lower().replace(b"%2f", b"%2F")
    assert b"evil.test" not in login[1] + page[1] + other[1]


async def test_a_first_line_of_another_kind_leads_nowhere(address: str) -> None:
    ours = f"Host: {urlsplit(address).netloc}\r\n"
    upgrade = f"{ours}Connection: Upgrade\r\nUpgrade: "
    tried = {
        f"CONNECT evil.test:443 HTTP/1.1\r\n{ours}\r\n": {401},
        f"OPTIONS * HTTP/1.1\r\n{ours}\r\n": {404},
        f"GET login HTTP/1.1\r\n{ours}\r\n": {404},
        f"GET //evil.test/login HTTP/1.1\r\n{ours}\r\n": {404},
        f"GET /static/../messages HTTP/1.1\r\n{ours}\r\n": {404},
        f"GET /static/%2e%2e/app.py HTTP/1.1\r\n{ours}\r\n": {404},
        f"GET /static/..%2f..%2fapp.py HTTP/1.1\r\n{ours}\r\n": {404},
        f"get /messages HTTP/1.1\r\n{ours}\r\n": {401},
        HTTP_2: {400, 421},
        f"GET /messages HTTP/1.1\r\n{upgrade}h2c\r\n\r\n{HTTP_2}": {303, 400, 421},
        f"GET /live HTTP/1.1\r\n{upgrade}websocket\r\n\r\n": {401},
    }
    told = {sent: await answers(address, sent.encode()) for sent in tried}

    assert {sent: each for sent, (each, _) in told.items() if not each or not set(each) <= tried[sent]} == {}
    assert [sent for sent, (_, answer) in told.items() if b"101 Switching" in answer] == []
