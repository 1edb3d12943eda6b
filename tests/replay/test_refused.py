"""What `relay replay` refuses, in one line, before it makes a job."""

from pathlib import Path

import psycopg
import pytest

from tests.cli.command import Command


@pytest.fixture
def relay(tmp_path: Path, database_url: str, broker_url: str) -> Command:
    return Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--all for every sent row"),
        (["--all", "--since", "1h"], "exclude each other"),
        (["--all", "--aggregate-id", ""], "exclude each other"),
        (["--since", "1h", "--until", "2h"], "is not before --until 2h"),
        (["--since", "2999-01-01T00:00:00Z"], "is not before now"),
        (["--since", "2026-11-21T08:00:00"], "says no time zone"),
        (["--since", "yesterday"], "takes a moment such as"),
        (["--until", "99999999999d"], "takes a moment such as"),
        (["12"], "MESSAGE-ID"),
        (["--all", "--rate", "0"], "rate"),
        (["--all", "--to-exchange", "missing"], "no exchange 'missing'"),
        (["--all", "--to-exchange", "", "--routing-key", "missing"], "no queue 'missing'"),
        (["--all", "--to-exchange", "x" * 256], "255 bytes"),
        (["--all", "--routing-key", "k"], "--routing-key needs --to-exchange"),
    ],
)
def test_what_cannot_be_is_refused_before_a_job_is_made(
    relay: Command, database_url: str, arguments: list[str], words: str
) -> None:
    ended = relay("replay", *arguments)

    refusal = [line for line in ended.err.splitlines() if line.startswith("relay: ")]
    assert (ended.code, len(refusal)) == (2, 1), ended.err
    assert words in refusal[0]
    assert jobs(database_url) == 0


def test_a_broker_that_is_not_there_makes_no_job(relay: Command, database_url: str) -> None:
    ended = relay("replay", "--all", RELAY_BROKER_URL="amqp://127.0.0.1:1/")

    assert ended.code == 1
    assert "broker.url" in ended.err
    assert jobs(database_url) == 0


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["jobs", "resume", "7"], "there is no job 7", 1),
        (["jobs", "cancel", "7", "--why", "test", "--yes"], "there is no job 7", 1),
        (["jobs", "show", "7"], "there is no job 7", 1),
    ],
)
def test_a_job_that_is_not_there(relay: Command, arguments: list[str], words: str, code: int) -> None:
    ended = relay(*arguments)

    assert (ended.code, ended.err.count("\n")) == (code, 1)
    assert words in ended.err


def test_a_job_that_has_ended_is_neither_resumed_nor_cancelled(relay: Command) -> None:
    assert relay.process("replay", "--all").code == 0

    resumed, cancelled = relay("jobs", "resume", "1"), relay("jobs", "cancel", "1", "--dry-run")

    assert (resumed.code, cancelled.code) == (2, 2)
    assert "replay 1 is done: there is nothing to resume" in resumed.err
    assert "replay 1 is done: there is nothing to cancel" in cancelled.err


def jobs(database_url: str) -> int:
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT count(*) FROM outbox.job").fetchone()
    assert row is not None
    return int(row[0])
