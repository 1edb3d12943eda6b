"""A program that asks `/api/v1`."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console.access.tokens import TokenFile
from relay.operate.operation import Role
from tests.console.site import browser, running, users
from tests.support.eventually import eventually

PREFIX = "/api/v1"


def tokens(folder: Path) -> dict[Role, str]:
    """Return a token of each role, in a file of this folder."""
    file = TokenFile(folder / "tokens")
    return {role: file.add(f"program-{role}", role) for role in Role}


@dataclass(frozen=True, slots=True)
class Program:
    """Asks with the token of its role."""

    client: httpx.AsyncClient
    tokens: Mapping[Role, str]
    role: Role | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, app: FastAPI, tokens: Mapping[Role, str]) -> AsyncIterator["Program"]:
        async with browser(app) as client:
            yield cls(client, tokens)

    @classmethod
    @asynccontextmanager
    async def running(cls, settings: Settings, folder: Path, **console: Any) -> AsyncIterator["Program"]:
        """Yield a program that may do everything, of a console with these settings of the section `[console]`."""
        given = tokens(folder)
        section = {**users(folder), "tokens": str(folder / "tokens"), **console}
        async with running(settings, **section) as app, cls.open(app, given) as program:
            yield program.as_(Role.OWNER)

    def as_(self, role: Role | None) -> "Program":
        return Program(self.client, self.tokens, role)

    async def get(self, path: str, **parameters: Any) -> httpx.Response:
        return await self.client.get(PREFIX + path, params=parameters, headers=self.headers)

    async def post(self, path: str, body: object, *, key: str | None = None) -> httpx.Response:
        headers = {**self.headers, "Idempotency-Key": key or str(uuid4())}
        return await self.client.post(PREFIX + path, json=body, headers=headers)

    async def job(self, ordered: httpx.Response, *states: str) -> dict[str, Any]:
        """Return the job that a request has ordered once it has ended, or is in one of these states."""
        told = ordered.json()
        job: dict[str, Any] = told.get("job", told)

        async def is_there() -> bool:
            job.update((await self.get(f"/jobs/{job['id']}")).json()["job"])
            return job["state"] in (states or ("done", "cancelled"))

        await eventually(is_there, f"the job is {states or 'over'}")
        return job

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.role is None else {"Authorization": f"Bearer {self.tokens[self.role]}"}
