"""`relay failures`, `relay jobs`, and bulk commands with a group, stages and a rate."""

import json

import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.operate.settler import Settler

AUDIT = "SELECT command, done_by, why, job FROM outbox.operator_audit ORDER BY id"


def test_failures_are_listed_shown_and_repaired_by_their_group(relay: Command, rows: Rows) -> None:
    first, other = rows.parked("a"), rows.parked("b", event_type="Paid")

    listed = json.loads(relay("failures", "list", "--output", "json").out)
    (group,) = [each["id"] for each in listed if each["event_type"] == "InvoiceIssued"]
    table = relay("failures", "list").out
    shown = relay("failures", "show", group).out
    foreseen = relay("parked", "retry", "--group", group, "--dry-run")
    done = relay("parked", "retry", "--group", group, "--why", "bound it")
    gone = relay("failures", "show", group)

    assert f"{group}\tparked\t1\tInvoiceIssued\t" in table
    assert f"repair\trelay parked retry --group {group}\n" in shown
    assert foreseen.out == "would retry 1 row, and release 0 held behind it\n"
    assert (done.code, done.out) == (0, "retried 1 row, and released 0 held behind it\n")
    assert (gone.code, gone.err) == (1, f"relay: there is no failure group {group} now: see `relay failures list`\n")
    assert rows.states() == {first: ("pending", None), other: ("parked", None)}


def test_rows_are_archived_listed_and_restored(relay: Command, rows: Rows) -> None:
    row = rows.parked("a")

    refused = relay("parked", "archive", "--all")
    archived = relay("parked", "archive", "--all", "--why", "next quarter")
    listed = relay("parked", "list", "--archived").out
    retried = relay("parked", "retry", str(row))
    restored = relay("parked", "restore", str(row), "--why", "now")

    assert (refused.code, refused.err) == (2, "relay: --why is needed: it is kept with who did it and when\n")
    assert (archived.code, archived.out) == (0, "archived 1 row, and released 0 held behind it\n")
    assert f"{row}\t" in listed
    assert retried.err == f"relay: {row} is not parked: it is archived: `relay parked restore {row}` parks it again\n"
    assert (restored.code, restored.out) == (0, "restored 1 row\n")
    assert rows.states() == {row: ("parked", None)}


def test_discarded_rows_are_listed_and_restored_by_id_and_by_job(relay: Command, rows: Rows) -> None:
    row, other = rows.parked("a"), rows.parked("b")
    relay("parked", "discard", "--all", "--why", "test data", "--yes")

    plain = relay("parked", "restore", str(row), "--why", "now")
    listed = json.loads(relay("parked", "list", "--discarded", "-o", "json").out)
    by_id = relay("parked", "restore", "--discarded", str(row), "--why", "now")
    foreseen = relay("parked", "restore", "--job", "1", "--dry-run")
    by_job = relay("parked", "restore", "--job", "1", "--why", "now")
    of_a_restore = relay("parked", "restore", "--job", "3", "--why", "now")
    both = relay("parked", "list", "--archived", "--discarded")

    remedy = f"it was discarded: `relay parked restore --discarded {row}` parks it again"
    assert (plain.code, plain.err) == (1, f"relay: {row} is not archived: {remedy}\n")
    assert [each["id"] for each in listed["rows"]] == [row, other]
    assert (by_id.code, by_id.out) == (0, "restored 1 row\n")
    assert foreseen.out == "would restore 1 row\n"
    assert (by_job.code, by_job.out) == (0, "restored 1 row\n")
    assert rows.states() == {row: ("parked", None), other: ("parked", None)}
    assert of_a_restore.err == "relay: job 3 (restore) has neither archived nor discarded rows\n"
    assert (both.code, both.err) == (2, "relay: archived or discarded, not both\n")


def test_jobs_are_listed_shown_paused_and_cancelled(relay: Command, rows: Rows) -> None:
    rows.parked("a")
    relay("parked", "retry", "--all", "--by", "ada", "--why", "mended")
    rows.connection.execute(
        "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('discard', 'parked', 'ada', '{}')"
    )

    listed = relay("jobs", "list").out.splitlines()
    retries = json.loads(relay("jobs", "list", "--kind", "retry", "--output", "json").out)
    shown = relay("jobs", "show", "1").out
    paused = relay("jobs", "pause", "2", "--by", "bob", "--why", "lunch")
    state = json.loads(relay("jobs", "show", "2", "--output", "json").out)["job"]
    cancelled = relay("jobs", "cancel", "2", "--why", "the wrong ones", "--yes")
    over = [relay("jobs", verb, "2") for verb in ("resume", "pause")]
    unknown = relay("jobs", "show", "7")

    assert [line.split("\t")[:4] for line in listed[1:]] == [
        ["2", "discard", "parked", "interrupted"],
        ["1", "retry", "parked", "done"],
    ]
    assert [(job["id"], job["selected"], job["done"], job["why"]) for job in retries] == [(1, 1, 1, "mended")]
    assert "made by\tada\n" in shown
    assert paused.out == "paused job 2 (discard) after 0 of uncounted rows\n"
    assert (state["state"], state["paused_because"]) == ("paused", "paused by bob: lunch")
    assert cancelled.out == "cancelled job 2 (discard), of which 0 rows are done\n"
    assert {each.code for each in over} == {2}
    assert unknown.err == "relay: there is no job 7: see `relay jobs list`\n"


def test_commands_say_what_became_of_a_retry(relay: Command, rows: Rows, database_url: str) -> None:
    first, _ = rows.parked("a"), rows.parked("b")
    rows.node()
    words = "of 2: 1 parked again, 1 sent"

    with Settler(database_url, fails=lambda id_: id_ == first):
        retried = relay("parked", "retry", "--all")
    listed = relay("jobs", "list").out.splitlines()
    shown = relay("jobs", "show", "1").out

    assert (retried.code, retried.err) == (1, f"relay: {words}: `relay jobs show 1` tells which, and why\n")
    assert listed[1].split("\t")[-1] == words
    assert f"outcome\t{words}\n" in shown
    assert "how far\t2 of 2\n" in shown
    assert "\tnot again\n" in shown


def test_a_retry_without_a_relay_says_that_its_rows_wait(relay: Command, rows: Rows) -> None:
    rows.parked()

    retried = relay("parked", "retry", "--all")

    assert (retried.code, retried.err) == (0, "of 1: 1 not sent yet: `relay status` tells why\n")


def test_a_job_is_resumed_with_what_it_was_told(relay: Command, rows: Rows) -> None:
    row, other = rows.parked("a"), rows.parked("b")
    rows.connection.execute(
        "INSERT INTO outbox.job (kind, source, made_by, why, filter, state, stages)"
        " VALUES ('discard', 'parked', 'ada', 'test data', %s, 'paused', NULL)",
        [json.dumps({"ids": [row]})],
    )

    resumed = relay("jobs", "resume", "1", "--by", "bob")

    assert (resumed.code, resumed.out) == (0, "discarded 1 row, and released 0 held behind it\n")
    assert rows.states() == {row: ("discarded", None), other: ("parked", None)}
    assert rows.connection.execute(AUDIT).fetchall() == [
        ("jobs resume", "bob", None, 1),
        ("parked discard", "ada, resumed by bob", "test data", 1),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stages", "1,10"], "--stages takes rising numbers and then all, such as 1,10,100,all; not '1,10'"),
        (["--stages", "10,1,all"], "--stages takes rising numbers and then all, such as 1,10,100,all; not '10,1,all'"),
        (["--stages", "all"], "--stages takes rising numbers and then all, such as 1,10,100,all; not 'all'"),
        (["--stages", "0,all"], "--stages takes rising numbers and then all, such as 1,10,100,all; not '0,all'"),
        (["--stages", "1,all", "--stop-when-failing", "5"], "takes a share such as 5%, from 0% to 100%; not '5'"),
        (["--stages", "1,all", "--stop-when-failing", "101%"], "from 0% to 100%; not '101%'"),
        (["--stop-when-failing", "5%"], "--stop-when-failing needs --stages, such as --stages 1,10,100,all"),
    ],
)
def test_stages_that_cannot_be_are_refused(relay: Command, rows: Rows, flags: list[str], words: str) -> None:
    row = rows.parked("a")

    for command in (["parked", "retry"], ["replay"]):
        refused = relay(*command, "--all", *flags)

        assert refused.code == 2
        assert words in refused.err
    assert rows.states() == {row: ("parked", None)}


def test_routes_of_a_group_are_discarded_together(relay: Command, rows: Rows) -> None:
    ids = [rows.quarantined(key, key) for key in ("orders.1", "orders.2")]
    (group,) = json.loads(relay("failures", "list", "--output", "json").out)

    refused = relay("quarantine", "discard", "1", "--group", group["id"], "--why", "x", "--yes")
    probed = relay("quarantine", "probe", "--group", group["id"])
    done = relay("quarantine", "discard", "--group", group["id"], "--why", "nobody reads them", "--yes")

    assert (refused.code, refused.err) == (2, "relay: give the number of a route, or --group: one of both\n")
    assert probed.out == "asked for a probe of 2 routes\n"
    assert done.out == "discarded 1 row of route 1\ndiscarded 1 row of route 2\n"
    assert rows.states() == dict.fromkeys(ids, ("discarded", None))
