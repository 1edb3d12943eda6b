"""The Python programs in README.md run as they are copied, and those in the docs pass mypy strict."""

import os
import re
import signal
import sys
from pathlib import Path

import psycopg
from aio_pika.abc import AbstractChannel

from tests.engine.conftest import RunNode
from tests.support.eventually import eventually
from tests.support.process import Process, run
from tests.support.queues import declare_bound

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/configuration.md", "docs/consumer.md", "docs/metrics.md", "docs/partitioned-consumers.md"]
PAGES += ["docs/publisher.md"]

# Of a user's, who has not this project's configuration.
STRICT = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'snippets'}", "--follow-imports=silent"]

APPLIED = "SELECT array_agg(id ORDER BY id) FROM billing.invoice_projection"


def snippets(page: str, language: str = "python") -> list[str]:
    """Return the page's programs, without those for Spark, which tests/spark runs."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [each for each in found if "outbox_spark" not in each]


async def test_the_programs_of_the_readme_run_as_they_are(
    channel: AbstractChannel, run_node: RunNode, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    await declare_bound(channel, "invoices")
    by_psycopg, by_alchemy, publisher, consumer = snippets("README.md")
    environment = {**os.environ, "RELAY_DATABASE_URL": database_url, "RELAY_BROKER_URL": broker_url}
    python = [sys.executable, "-W", "error", "-c"]
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute(snippets("README.md", "sql")[0].encode())

        printed = [run([*python, each], environment=environment) for each in (by_psycopg, by_alchemy, publisher)]
        log = tmp_path / "consumer"
        consuming = Process([*python, consumer], log=log, environment=environment)
        try:
            async with run_node():
                await eventually(lambda: has_applied(connection, [42, 43, 44]), "each invoice is applied", 30)
        finally:
            consuming.stop(signal.SIGTERM)

    assert (consuming.returncode, log.read_text()) == (0, "")
    assert printed == ["", "", ""]


async def has_applied(connection: psycopg.AsyncConnection, invoices: list[int]) -> bool:
    return await (await connection.execute(APPLIED)).fetchone() == (invoices,)


def test_the_programs_of_the_docs_are_complete_for_mypy_strict(tmp_path: Path) -> None:
    for page in PAGES:
        for number, snippet in enumerate(snippets(page)):
            (tmp_path / f"{Path(page).stem.replace('-', '_')}_{number}.py").write_text(snippet)
    (tmp_path / "settings.py").write_text(
        "from relay.config.settings import BrokerSettings, DatabaseSettings\n\n"
        'DatabaseSettings(url="postgresql://h/d", schema="billing")\n'
        'BrokerSettings(url="amqp://h")\n'
    )

    run(
        [sys.executable, "-m", "mypy", *STRICT, *tmp_path.glob("*.py")],
        environment={**os.environ, "MYPYPATH": str(ROOT)},
    )
