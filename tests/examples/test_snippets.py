"""The commands and programs in README.md run as they are copied, and those in the docs pass mypy strict."""

import os
import signal
import sys
from pathlib import Path

import psycopg

from relay.config.settings import DatabaseSettings
from relay.testing.servers.process import Process, run
from tests.cli.command import RELAY
from tests.prose.pages import programs
from tests.support.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/configuration.md", "docs/consumer.md", "docs/metrics.md", "docs/partitioned-consumers.md"]
PAGES += ["docs/publisher.md", "docs/write.md", "docs/consume-elsewhere.md"]

# Of a user's, who has not this project's configuration.
STRICT = ["--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'snippets'}", "--follow-imports=silent"]

APPLIED = "SELECT array_agg(id ORDER BY id) FROM billing.invoice_projection"


def snippets(page: str, language: str = "python") -> list[str]:
    """Return the page's programs, without those for Spark, which tests/spark runs."""
    return [each for each in programs(page, language) if "outbox_spark" not in each]


async def test_the_readme_leads_from_no_tables_to_applied_messages(
    empty_database: DatabaseSettings, broker_url: str, tmp_path: Path
) -> None:
    """With what it and the pages behind it say, and nothing else: no exchange, queue or table is there before."""
    by_psycopg, consumer = snippets("README.md")
    (by_alchemy, declared), (publisher, *_) = snippets("docs/write.md"), snippets("docs/publisher.md")
    empty_url = empty_database.url.get_secret_value()
    (tmp_path / "relay.toml").write_text(snippets("README.md", "toml")[0])
    environment = {**os.environ, "RELAY_DATABASE_URL": empty_url, "RELAY_BROKER_URL": broker_url}
    relay: list[str | Path] = ["env", "--chdir", tmp_path, RELAY]
    python = [sys.executable, "-W", "error", "-c"]
    async with await psycopg.AsyncConnection.connect(empty_url, autocommit=True) as connection:
        run([*relay, "migrate"], environment=environment)
        await connection.execute(snippets("README.md", "sql")[0].encode())
        printed = [
            run([*python, each], environment=environment) for each in (by_psycopg, by_alchemy, declared, publisher)
        ]
        run([*relay, "topology", "apply"], environment=environment)

        started = [
            Process([RELAY, "run"], log=tmp_path / "relay", folder=tmp_path, environment=environment),
            Process([*python, consumer], log=tmp_path / "consumer", environment=environment),
        ]
        try:
            await eventually(lambda: has_applied(connection, [42, 43, 44]), "each invoice is applied", 30)
        finally:
            for each in started:
                each.stop(signal.SIGTERM)

    assert [each.returncode for each in started] == [0, 0]
    assert (printed, (tmp_path / "consumer").read_text()) == (["", "", "", ""], "")


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
