"""`relay migrate --downgrade`: what goes is counted, and nothing goes unasked or under a running relay."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import current_revision
from relay.testing.servers.process import wait_for
from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.support.revision import is_at_head

BASE = ["migrate", "--downgrade", "base"]
WHY = ["--why", "a trial that is over"]
APPLY = "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day) VALUES ('c', %s, '1970-01-01')"


@pytest.fixture
def some_rows(rows: Rows) -> Rows:
    rows.pending()
    rows.pending()
    rows.parked()
    rows.connection.execute(APPLY, ["00000000-0000-0000-0000-000000000001"])
    return rows


def test_a_dry_run_counts_the_rows_that_would_go(relay: Command, some_rows: Rows, database: DatabaseSettings) -> None:
    all_, inbox_only = relay(*BASE, "--dry-run"), relay("migrate", "--downgrade", "0008", "--dry-run")

    counts = dict(line.rsplit("\t", 1) for line in all_.out.splitlines())
    assert (all_.code, all_.err) == (0, "")
    assert (counts["message\tpending"], counts["message\tparked"], counts["message\tsent"]) == ("2", "1", "0")
    assert (counts["processed_message\t"], counts["batch\t"]) == ("1", "0")
    assert "message" not in {line.split("\t")[0] for line in inbox_only.out.splitlines()}
    assert "pool_member\t\t0" in inbox_only.out
    assert is_at_head(database)


def test_a_downgrade_with_yes_and_why_is_done_and_logged(
    relay: Command, some_rows: Rows, database: DatabaseSettings
) -> None:
    done = relay.process(*BASE, "--yes", *WHY)

    assert done.code == 0
    assert "message\tpending\t2" in done.out
    assert done.out.endswith("schema outbox is of version none\n")
    assert '"event": "schema.downgraded"' in done.err
    assert '"why": "a trial that is over"' in done.err
    assert current_revision(database) is None


@pytest.mark.parametrize("revision", ["9998", "nonsense"])
def test_a_version_that_is_not_there_is_refused(relay: Command, rows: Rows, revision: str) -> None:
    refused = relay("migrate", "--downgrade", revision, "--dry-run")

    assert refused.code == 2
    assert refused.err.endswith(f", 0002, 0001, base: not to {revision}\n")


@pytest.mark.parametrize("flag", ["--yes", "--dry-run", "--force"])
def test_flags_of_a_downgrade_go_with_it_alone(relay: Command, flag: str) -> None:
    refused = relay("migrate", flag)

    assert refused.code == 2
    assert "--downgrade" in refused.err


@pytest.fixture
def running(database_url: str, broker_url: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A relay that holds lanes."""
    command = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url, RELAY_NODE="first")
    with command.start("run") as process, psycopg.connect(database_url, autocommit=True) as connection:
        held = "SELECT count(*) FROM outbox.node WHERE cardinality(lanes) > 0"
        wait_for(lambda: connection.execute(held).fetchone() == (1,), "the relay has lanes", 60)
        yield process


def test_a_running_relay_is_named_and_kept_unless_told_otherwise(
    relay: Command, running: subprocess.Popen[str], database: DatabaseSettings
) -> None:
    refused = relay(*BASE, "--yes", *WHY)

    assert refused.code == 1
    assert "these relays run on the tables: first; nothing was done" in refused.err
    assert is_at_head(database)


@pytest.mark.parametrize("revision", ["base", "0004"])
def test_a_relay_whose_tables_go_ends_with_one_clear_line(
    relay: Command, running: subprocess.Popen[str], revision: str
) -> None:
    done = relay.process("migrate", "--downgrade", revision, "--yes", "--force", *WHY)
    _, said = running.communicate(timeout=60)

    assert done.code == 0
    assert running.returncode == 1
    assert "Traceback" not in said
    last = json.loads(said.splitlines()[-1])
    assert (last["event"], last["exit_code"]) == ("relay.failed", 1)
    assert "relay migrate" in last["error"]
