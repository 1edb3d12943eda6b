"""The figures move, and a hundred open pages cost the database no more than one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from relay.config.settings import DatabaseSettings, Settings
from relay.console import consumers, runner, sampler
from relay.console.database import MOST_CONNECTIONS
from relay.console.sampler import Sampler
from relay.operate.operation import Role
from tests.console.rows import waiting
from tests.console.site import Address, browser, log_in, post, running, serving, session_cookie, users
from tests.support.eventually import eventually

BROWSERS = 100
LOOKS = 6


@asynccontextmanager
async def open_page(address: str, headers: dict[str, str] | None = None) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the lines that an open page gets."""
    async with (
        httpx.AsyncClient(base_url=address, timeout=60, headers=headers) as client,
        client.stream("GET", "/live") as answer,
    ):
        assert answer.status_code == 200
        yield answer.aiter_lines()


def brought(address: Address) -> dict[str, str]:
    """Return the headers of a program that has the token of the start."""
    return {"Authorization": f"Bearer {address.token}"}


async def events(lines: AsyncIterator[str], number: int) -> str:
    """Return what comes up to the end of so many looks; each changes the figures."""
    text, is_figures = "", False
    async for line in lines:
        text += f"{line}\n"
        is_figures |= line == "event: figures"
        if not line and is_figures:
            is_figures = False
            if (number := number - 1) == 0:
                return text
    raise AssertionError("the stream has ended")


def transactions(url: str, name: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        (number,) = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", [name]
        ).fetchone() or (0,)
        return int(number)


@pytest.fixture
def looks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the console does by the clock, also when nobody watches, is not done."""
    monkeypatch.setattr(consumers, "INTERVAL", 3600.0)
    monkeypatch.setattr(sampler, "POINT", 3600.0)
    monkeypatch.setattr(runner, "LOOK_INTERVAL", 3600.0)


@pytest.mark.usefixtures("looks_alone")
async def test_a_hundred_open_pages_cost_the_database_no_more_than_one(
    settings: Settings, database: DatabaseSettings, database_url: str
) -> None:
    name = database_url.rpartition("/")[2].partition("?")[0]
    elsewhere = database_url.replace(name, "postgres")  # so that asking does not count

    async def cost(address: Address, browsers: int) -> int:
        async with AsyncExitStack() as pages:
            open_ = [await pages.enter_async_context(open_page(address, brought(address))) for _ in range(browsers)]
            await asyncio.gather(*(events(lines, 2) for lines in open_))
            before = transactions(elsewhere, name)
            await asyncio.gather(*(events(lines, LOOKS) for lines in open_))
            return transactions(elsewhere, name) - before

    async with serving(settings) as address:
        one = await cost(address, 1)
        hundred = await cost(address, BROWSERS)

    # Statistics reach the server up to a second late: the cost of a look may be counted on either side.
    assert one > 0
    assert hundred <= one * (LOOKS + 2) / (LOOKS - 2)


async def test_each_of_a_hundred_open_pages_shows_what_has_changed(settings: Settings, database_url: str) -> None:
    async def changed(lines: AsyncIterator[str]) -> None:
        while "3 parked" not in await events(lines, 1):
            pass

    async with serving(settings) as address, AsyncExitStack() as pages:
        open_ = [await pages.enter_async_context(open_page(address, brought(address))) for _ in range(BROWSERS)]
        before = await asyncio.gather(*(events(lines, 1) for lines in open_))
        waiting(database_url, "parked", 3)
        await asyncio.wait_for(asyncio.gather(*map(changed, open_)), 30)

    assert [text for text in before if "3 parked" in text] == []
    assert all("event: figures" in text for text in before)


async def test_a_logout_ends_the_stream(settings: Settings, tmp_path: Path) -> None:
    async with (
        serving(settings, **users(tmp_path)) as address,
        httpx.AsyncClient(base_url=address, timeout=60) as client,
    ):
        session = await session_cookie(address, Role.VIEWER)
        async with open_page(address, {"Cookie": session}) as lines:
            await events(lines, 1)
            await client.post("/logout", data={}, headers={"Origin": address, "Cookie": session})
            rest = await asyncio.wait_for(_rest(lines), 30)

    assert rest is not None


async def _rest(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def test_a_stranger_gets_no_figures(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        answer = await client.get("/live")

    assert answer.status_code == 401


async def test_the_history_has_the_worst_of_each_while(settings: Settings, database_url: str) -> None:
    async with running(settings) as app, browser(app) as client:
        sampler: Sampler = app.state.site.sampler
        waiting(database_url, "pending", 5)

        async def seen() -> bool:
            return bool(sampler.latest and sampler.latest.history and sampler.latest.history[-1].backlog == 5)

        watching = asyncio.create_task(_watch(sampler))
        await eventually(seen, "the backlog is in the history")
        watching.cancel()
        page = await client.get("/")

    assert "rows wait" in page.text


async def _watch(sampler: Sampler) -> None:
    async for _ in sampler.samples():
        pass


async def test_users_who_take_all_connections_are_no_lost_database(settings: Settings) -> None:
    async with running(settings) as app:
        site = app.state.site
        await eventually(lambda: site.sampler.latest is not None, "the console has looked")
        with ExitStack() as others:
            for _ in range(MOST_CONNECTIONS):
                others.enter_context(site.database.session())
            before = site.sampler.latest.number
            # The first of them may be under way.
            await eventually(lambda: site.sampler.latest.number >= before + 2, "it has looked twice")

    assert site.sampler.latest.error is None


async def test_a_database_that_does_not_answer_is_the_verdict(settings: Settings, tmp_path: Path) -> None:
    away = settings.model_copy(
        update={
            "database": DatabaseSettings.model_validate({"url": "postgresql://127.0.0.1:1/none", "connect_timeout": 1})
        }
    )
    async with running(away, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        sampler: Sampler = app.state.site.sampler

        async def looked() -> bool:
            return sampler.latest is not None

        await eventually(looked, "the console has looked")
        page = await client.get("/")
        other = await client.get("/messages")
        await post(client, "/logout", {})

    assert page.status_code == 200
    assert "The database does not answer" in page.text
    assert other.status_code == 503
