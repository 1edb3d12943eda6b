"""A candidate that cannot become the master logs it once, and its relay goes on delivering."""

import asyncio
import secrets
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, Settings
from relay.consume.pool.candidate import Candidate, candidate_beside
from relay.errors import AccessError, SchemaError
from tests.support.eventually import eventually
from tests.support.proxied import proxied


@pytest.fixture
def stranger(database_url: str) -> Iterator[DatabaseSettings]:
    """A login that sees the schema and may read nothing in it."""
    name = f"stranger_{secrets.token_hex(4)}"
    parts = urlsplit(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'p'; GRANT USAGE ON SCHEMA outbox TO {name}".encode())
        url = parts._replace(netloc=f"{name}:p@{parts.hostname}:{parts.port}").geturl()
        yield DatabaseSettings(url=SecretStr(url))
        connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


async def test_without_rights_it_names_the_remedy(stranger: DatabaseSettings) -> None:
    with pytest.raises(AccessError, match=r"permission denied for .*pool.*: `relay config roles` prints"):
        await Candidate(stranger, "m").run()


async def test_without_tables_it_names_the_remedy(database: DatabaseSettings) -> None:
    with pytest.raises(SchemaError, match="schema 'elsewhere' has no tables of pools: run `relay migrate`"):
        await Candidate(database.model_copy(update={"schema_name": "elsewhere"}), "m").run()


async def test_beside_a_relay_it_is_told_once(stranger: DatabaseSettings, settings: Settings) -> None:
    with capture_logs() as events:
        async with candidate_beside(settings.model_copy(update={"database": stranger})):
            await eventually(lambda: bool(events), "it is told")
            await asyncio.sleep(0.5)

    assert [event["event"] for event in events] == ["pool.not_served"]


@pytest.mark.parametrize("members", [0, 1])
async def test_a_lost_database_is_told_once_and_by_a_relay_only_where_a_pool_has_members(
    members: int, database: DatabaseSettings, settings: Settings
) -> None:
    with psycopg.connect(database.url.get_secret_value(), autocommit=True) as connection:
        connection.execute("INSERT INTO outbox.pool VALUES ('p', 'q', 3600)")
        connection.execute("INSERT INTO outbox.pool_member (pool, name) SELECT 'p', 'm' LIMIT %s", [members])
    async with proxied(database) as (proxy, far):
        beside = settings.model_copy(update={"database": far})
        with capture_logs() as events:
            async with candidate_beside(beside):
                await eventually(lambda: "pool.master_assumed" in told(events), "it is the master")
                proxy.refusing = True
                proxy.cut()

                await eventually(lambda: proxy.refused >= 4, "it has tried several times")
                proxy.refusing = False
                await eventually(lambda: told(events).count("pool.master_assumed") == 2, "it is the master again")

    assert told(events).count("pool.session_lost") == members


def told(events: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return [event["event"] for event in events]
