"""Each extra alone, with the oldest and the newest versions that it allows, does its part on real servers."""

from pathlib import Path

import aio_pika
import pytest

from relay.testing.servers.process import run
from tests.consume.effects import Queue
from tests.installs.conftest import Install
from tests.support.queues import declare_bound

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).parent / "programs"
BINARY = ("psycopg[binary]",)  # the application's own choice, as the write side leaves it


@pytest.mark.parametrize("versions", ["oldest", "newest"])
@pytest.mark.parametrize(
    ("program", "extras", "beside"),
    [
        ("write", [], BINARY),
        ("write_alchemy", ["sqlalchemy"], BINARY),
        ("write_alchemy", ["sqlalchemy"], (*BINARY, "sqlalchemy<2.1")),
        ("write_traced", ["otel"], BINARY),
        ("read_back", ["testing"], BINARY),
        ("write_declared", ["events"], BINARY),
        ("django_app", ["django"], BINARY),
        ("write_spark", ["spark"], ()),
        ("write_spark", ["spark-cluster"], ("pyspark>=4.1,<4.2",)),
        ("write_spark", ["spark-cluster"], ("pyspark>=3.5,<3.6",)),
        ("publish", ["publisher"], ()),
        ("consume", ["consume"], ()),
        ("consume_alchemy", ["consume", "sqlalchemy"], ("sqlalchemy<2.1",)),
        ("run_relay", ["relay"], ()),
    ],
)
async def test_an_extra_alone_does_its_part(
    program: str,
    extras: list[str],
    beside: tuple[str, ...],
    versions: str,
    install: Install,
    database_url: str,
    broker_url: str,
) -> None:
    python = install(versions, *extras, beside=beside)
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        await declare_bound(channel, "billing")
        await Queue(channel).send(1)

        run([python, PROGRAMS / f"{program}.py", database_url, broker_url])
