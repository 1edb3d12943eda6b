"""`relay quarantine`, and where a row is that a command is asked about."""

import json
import re
import threading
from uuid import uuid4

import pytest

from relay.testing.servers.process import wait_for
from tests.cli.command import Command
from tests.operate.rows import Rows

# As the relay notes a probe in one transaction; the row keeps its moment when it comes back.
PROBED = """
    WITH noted AS (
        UPDATE outbox.quarantine SET probes = 1, probed_at = now() WHERE id = %(route)s
    )
    UPDATE outbox.message SET available_at = now() WHERE state = 'quarantined' AND id = %(row)s
"""
MINE = ("--why", "the queue is gone", "--by", "ada")


def test_routes_are_listed_and_shown_by_number_or_row(relay: Command, rows: Rows) -> None:
    first = rows.quarantined("gone")
    rows.quarantined("gone", "2")

    listed = json.loads(relay("quarantine", "list", "-o", "json").out)
    shown = json.loads(relay("quarantine", "show", "1", "-o", "json").out)
    by_message_id = relay("quarantine", "show", shown["rows"][0]["message_id"])

    assert [(each["id"], each["routing_key"], each["rows"]) for each in listed] == [(1, "gone", 2)]
    assert listed[0]["next_probe_by"] > listed[0]["since"]
    assert shown["rows"][0]["id"] == first
    assert "reason\t312 NO_ROUTE" in by_message_id.out
    assert relay("quarantine", "list").out.splitlines()[1].startswith("1\t\tgone\t2\t0\t2026-01-01 00:00:00Z")


def test_named_rows_are_rerouted_and_the_others_told_where_they_are(relay: Command, rows: Rows) -> None:
    moved, stays = rows.quarantined("gone"), rows.quarantined("gone", "2")
    parked = rows.parked("3")

    foreseen = relay("quarantine", "reroute", "1", str(moved), "--routing-key", "new", "--dry-run")
    done = relay("quarantine", "reroute", "1", str(moved), str(parked), "--routing-key", "new", *MINE)

    assert foreseen.out == "would reroute 1 row to exchange '', routing key 'new'\n"
    assert (done.code, done.out) == (3, "rerouted 1 row to exchange '', routing key 'new'\n")
    assert done.err == (f"relay: {parked} is left as it is: it is parked: see `relay parked show {parked}`\n")
    found = rows.connection.execute(
        "SELECT row.id, route.routing_key, row.routing_key, last_error FROM outbox.message AS row"
        " JOIN outbox.quarantine AS route ON route.id = quarantine ORDER BY row.id"
    ).fetchall()
    assert found == [(moved, "new", "new", "rerouted by ada: the queue is gone"), (stays, "gone", "gone", None)]
    audited = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audited == [("quarantine reroute", str(moved), "ada", "the queue is gone")]


def test_the_outcome_of_a_probe_is_told_of_each_route(relay: Command, rows: Rows) -> None:
    back, gone = rows.quarantined("gone"), rows.quarantined("works", "2")

    def answer() -> None:
        """Do as a relay does once it is asked."""
        asked = "SELECT FROM outbox.quarantine WHERE probes = 0"
        wait_for(lambda: rows.connection.execute(asked).rowcount == 2, "it is asked", 60)
        rows.connection.execute(PROBED, {"route": 1, "row": back})
        rows.connection.execute("UPDATE outbox.message SET state = 'pending', quarantine = NULL WHERE id = %s", [gone])
        rows.connection.execute("DELETE FROM outbox.quarantine WHERE id = 2")

    rows.connection.execute("UPDATE outbox.quarantine SET probes = 7")
    relaying = threading.Thread(target=answer)
    relaying.start()
    probed = relay("quarantine", "probe", "--wait", "60s")
    relaying.join()
    returned = json.loads(relay("quarantine", "list", "-o", "json").out)
    rows.connection.execute("UPDATE outbox.message SET state = 'pending' WHERE id = %s", [back])  # the next probe
    under_way = json.loads(relay("quarantine", "list", "-o", "json").out)
    released = relay("quarantine", "released").out.splitlines()

    lines = [re.sub(r"[0-9-]{10} [0-9:]{8}Z", "T", line) for line in probed.out.splitlines()]
    assert lines == [
        "asked for a probe of 2 routes",
        "route 1: probe at T: not accepted: 312 NO_ROUTE",
        "route 2: released at T, without a probe",
    ]
    assert probed.code == 3
    assert [(each["id"], each["last_probe"]) for each in returned] == [(1, "returned")]
    assert [(each["id"], each["last_probe"]) for each in under_way] == [(1, "under way")]
    assert released[1].startswith("2\t\tworks\t2026-01-01 00:00:00Z\t0\t\t")


def test_a_route_is_shown_with_what_is_listed_for_it(relay: Command, rows: Rows) -> None:
    rows.quarantined("gone")
    (relay.folder / "relay.toml").write_text('[[topology.queues]]\nname = "other"\n')
    without = relay("quarantine", "show", "1")
    (relay.folder / "relay.toml").write_text('[[topology.queues]]\nname = "gone"\n')
    listed = relay("quarantine", "show", "1")

    assert "topology\trelay.toml lists nothing that takes its messages" in without.out
    assert "topology\tqueue gone" in listed.out


def test_a_discard_is_foreseen_and_done(relay: Command, rows: Rows) -> None:
    stays, row = rows.quarantined("gone"), rows.quarantined("gone", "2")

    foreseen = relay("quarantine", "discard", "1", str(row), "--dry-run")
    done = relay("quarantine", "discard", "1", str(row), "--yes", *MINE)

    assert foreseen.out == "would discard 1 row of route 1, exchange '', routing key 'gone'\n"
    assert foreseen.err.startswith(f"{row}  ")
    assert (done.code, done.out) == (0, "discarded 1 row of route 1\n")
    assert rows.states() == {stays: ("quarantined", None), row: ("discarded", None)}
    assert "set_aside_by\tada\nset_aside_note\tthe queue is gone\n" in relay("parked", "show", str(row)).out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["reroute", "1", "--why", "x"], 2, "give --to-exchange, --routing-key, or both"),
        (["reroute", "1", "--routing-key", "gone", "--why", "x"], 2, "have this address already"),
        (["reroute", "1", "--to-exchange", "secret", "--why", "x"], 2, "not among broker.allowed_exchanges"),
        (["reroute", "1", "--routing-key", "new"], 2, "--why is needed"),
        (["reroute", "7", "--routing-key", "new", "--why", "x"], 1, "no route 7 is in quarantine"),
        (["show", "abc"], 2, "abc is no id and no message id"),
    ],
)
def test_what_cannot_be(arguments: list[str], code: int, words: str, relay: Command, rows: Rows) -> None:
    rows.quarantined("gone")

    result = relay("quarantine", *arguments, RELAY_BROKER_ALLOWED_EXCHANGES="outbox")

    assert (result.code, words in result.err) == (code, True)


def test_every_command_says_where_a_row_is(relay: Command, rows: Rows) -> None:
    message_id = uuid4()
    pending, delayed, sent = (
        rows.pending(message_id=message_id),
        rows.pending(available_at="2999-01-01T00:00:00Z"),
        rows.pending(),
    )
    rows.connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = %s", [sent])
    waiting = rows.quarantined("gone")
    words = {
        pending: "it is pending",
        delayed: "it is pending, and due at 2999-01-01 00:00:00Z",
        sent: "it was sent at 20",
        waiting: f"it is quarantined in route 1: see `relay quarantine show {waiting}`",
        12345: "no row of the outbox has this id",
    }

    for row, where in words.items():
        shown = relay("parked", "show", str(row))
        retried = relay("parked", "retry", str(row))

        assert shown.code == retried.code == 1
        assert shown.err == retried.err
        assert shown.err.startswith(f"relay: {row} is not parked: {where}")
    assert "it is pending" in relay("quarantine", "show", str(delayed)).err
    replayed = relay("replay", str(message_id), "--dry-run")
    assert f"{message_id} is not replayed: it is pending\n" in replayed.err
