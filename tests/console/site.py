"""A console in this process, and browsers of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI

from relay.config.settings import Authentication, ConsoleSettings, Settings
from relay.console.access.access import Access
from relay.console.access.cookie import NAME
from relay.console.access.identity import Identity
from relay.console.access.passwords import PasswordFile
from relay.console.app import make_app
from relay.console.serve import Server, served
from relay.jobs.job import operator
from relay.operate.operation import Role

ORIGIN = "https://relay.test"
PASSWORD = "correct horse battery"  # of every user here
PATIENT = {"statement_timeout": 60}  # seconds: a busy machine stalls for longer than the default


@asynccontextmanager
async def running(settings: Settings, **console: Any) -> AsyncIterator[FastAPI]:
    """Yield a console with these settings of the section `[console]`."""
    section = ConsoleSettings.model_validate({"origin": ORIGIN, **PATIENT, **console})
    app = make_app(settings.model_copy(update={"console": section}))
    async with app.router.lifespan_context(app):
        yield app


def browser(app: FastAPI, *, address: str = "127.0.0.1", origin: str = ORIGIN) -> httpx.AsyncClient:
    """Return a browser at this address, without cookies but for that of a user who has brought the start's token."""
    client = stranger(app, address=address, origin=origin)
    access: Access = app.state.site.access
    if access.start is not None:
        session = access.sessions.begin(Identity(operator(), Role.OWNER))
        client.cookies.set(NAME, session, domain=str(urlsplit(origin).hostname))
    return client


def stranger(app: FastAPI, *, address: str = "127.0.0.1", origin: str = ORIGIN) -> httpx.AsyncClient:
    """Return a browser without cookies, at this address."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 50_000))
    return httpx.AsyncClient(transport=transport, base_url=origin)


class Address(str):
    """Where a console listens.

    Attributes:
        entrance: what a browser opens first.
        token: of the start; empty where users log in.
    """

    entrance: str
    token: str

    @classmethod
    def of(cls, address: str, access: Access) -> "Address":
        found = cls(address)
        found.entrance = address if access.start is None else access.start.address(address)
        found.token = found.entrance.partition("token=")[2]
        return found


def users(folder: Path) -> dict[str, Any]:
    """Return settings with a password file that has a user of each role, named for it."""
    file = PasswordFile(folder / "users")
    for role in Role:
        file.put(role, role, PASSWORD)
    return {"authentication": Authentication.PASSWORD, "users": str(file.path)}


async def post(
    client: httpx.AsyncClient,
    path: str,
    form: Mapping[str, str | list[str]],
    *,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """Send a form as a browser does."""
    return await client.post(path, data=dict(form), headers={"Origin": ORIGIN, **(headers or {})})


async def log_in(client: httpx.AsyncClient, name: str, password: str = PASSWORD, *, to: str = "/") -> httpx.Response:
    """Log in with a name and a password."""
    await client.get("/login", params={"next": to})  # which gives the cookie
    return await post(client, "/login", {"name": name, "password": password, "next": to})


@asynccontextmanager
async def serving(settings: Settings, **console: Any) -> AsyncIterator[Address]:
    """Yield the address of a console that listens on loopback, as `relay console` does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving_at(listener, settings, **{"origin": address, **console}) as app:
            yield Address.of(address, app.state.site.access)


@asynccontextmanager
async def serving_at(listener: socket.socket, settings: Settings, **console: Any) -> AsyncIterator[FastAPI]:
    """Yield a console that listens on this socket."""
    section = ConsoleSettings.model_validate({**PATIENT, **console})
    app = make_app(settings.model_copy(update={"console": section}))
    server = Server(served(app))
    running = asyncio.create_task(server.serve([listener]), name="served console")
    try:
        yield app
    finally:
        await app.state.site.sampler.stop()
        server.should_exit = True
        await running


async def session_cookie(address: str, name: str) -> str:
    """Log in to a console that is served; return the header `Cookie` of the session, which no client sends by http."""
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        page = await client.get("/login")
        cookie = page.headers["Set-Cookie"].partition(";")[0]
        form = {"name": name, "password": PASSWORD}
        done = await client.post("/login", data=form, headers={"Origin": address, "Cookie": cookie})
    return str(done.headers["Set-Cookie"].partition(";")[0])
