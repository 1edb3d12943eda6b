"""`relay batches`: what Spark has written, and the end of a batch that will not be finished."""

import json

import psycopg
import pytest

from tests.cli.command import Command
from tests.operate.batches import AUDIT, WRITE
from tests.operate.rows import Rows

MINE = ("--why", "the input is gone", "--by", "ada")


def test_what_is_begun_stands_first_and_is_given_up_with_what_stays(relay: Command, rows: Rows) -> None:
    rows.connection.execute(WRITE)

    listed = relay("batches", "list").out.splitlines()
    dry = relay("batches", "give-up", "nightly", "7", "--dry-run")
    unasked = relay("batches", "give-up", "nightly", "7", *MINE)
    given_up = relay("batches", "give-up", "nightly", "7", *MINE, "--yes")
    shown = json.loads(relay("batches", "show", "nightly", "7", "-o", "json").out)
    after = json.loads(relay("batches", "list", "-o", "json").out)

    assert listed[1:] == [
        "nightly\t7\tbegun\t2026-11-21 08:00:00Z\t2 of 4\t11\tbilling.invoice\t\t",
        "daily\t1\tcommitted\t2026-11-21 13:00:00Z\t4 of 4\t9\tbilling.invoice\t70\t2",
        "daily\t2\tcommitted\t2026-11-21 12:00:00Z\t4 of 4\t\t\t\t",
    ]
    stays = "There stay 2 of its 4 pieces: 11 rows in billing.invoice, with their events"
    assert dry.out == f"would give up batch nightly 7 for good. {stays}\n"
    assert unasked.code == 2
    assert (given_up.code, given_up.out.splitlines()[0]) == (0, f"gave up batch nightly 7. {stays}")
    assert "writer = 'nightly' and batch_id = 7 in outbox.message" in given_up.out
    assert (shown["state"], shown["given_up_by"], shown["given_up_why"]) == ("given_up", "ada", "the input is gone")
    assert [each["state"] for each in after] == ["given_up", "committed", "committed"]
    assert rows.connection.execute(AUDIT).fetchall() == [("batches give-up", "nightly 7", "ada", "the input is gone")]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        (("daily", "1"), 2, "batch 'daily' version 1 is committed already, at 2026-11-21 13:00:00Z"),
        (("daily", "3"), 1, "no batch 'daily' version 3 is in the ledger: `relay batches list` has the newest"),
    ],
)
def test_what_has_ended_or_is_not_there_is_not_given_up(
    relay: Command, rows: Rows, name: tuple[str, str], code: int, words: str
) -> None:
    rows.connection.execute(WRITE)

    refused = relay("batches", "give-up", *name, *MINE, "--yes")

    assert (refused.code, words in refused.err) == (code, True), refused.err
    assert rows.connection.execute(AUDIT).fetchall() == []


def test_a_job_that_writes_a_piece_is_named_and_is_to_be_stopped_first(
    relay: Command, rows: Rows, database_url: str
) -> None:
    rows.connection.execute(WRITE)
    with psycopg.connect(database_url, application_name="outbox-spark") as job:
        job.execute(
            "INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)"
            " VALUES ('nightly', 7, 3, 4, gen_random_uuid(), '{}')"
        )

        refused = relay("batches", "give-up", "nightly", "7", *MINE, "--yes")

        assert refused.code == 1
        assert f"is being written, by session {job.info.backend_pid} (outbox-spark as postgres)" in refused.err
    assert rows.connection.execute("SELECT count(given_up_at) FROM outbox.batch").fetchone() == (0,)
