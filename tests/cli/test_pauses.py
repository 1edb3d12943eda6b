"""`relay quarantine pause` and `resume`, and `relay lanes`."""

import json

import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows

AUDIT = "SELECT command, target, done_by, why FROM outbox.operator_audit ORDER BY id"
MINE = ("--why", "billing is restored", "--by", "ada")


def test_a_route_is_paused_shown_and_resumed(relay: Command, rows: Rows) -> None:
    paused = relay("quarantine", "pause", "", "later", *MINE)
    (listed,) = json.loads(relay("quarantine", "list", "-o", "json").out)
    shown = relay("quarantine", "list").out.splitlines()[1].split("\t")
    status = json.loads(relay("status", "-o", "json").out)
    probed = relay("quarantine", "probe")
    asked = relay("quarantine", "probe", "1")
    resumed = relay("quarantine", "resume", "1", "--by", "bob")
    after = json.loads(relay("quarantine", "show", "1", "-o", "json").out)["route"]

    words = "paused route 1, exchange '', routing key 'later': `relay quarantine resume 1` ends that\n"
    assert (paused.code, paused.out) == (0, words)
    assert (listed["paused_by"], listed["paused_why"], listed["next_probe_by"]) == ("ada", "billing is restored", None)
    assert listed["reason"] == "paused by ada: billing is restored"
    assert shown[-3:-1] == ["paused by ada: billing is restored", "ada"]
    (reason,) = [each for each in status["reasons"] if "paused" in each]
    assert reason.startswith("exchange '', routing key 'later' is paused by ada since ")
    assert reason.endswith(" (billing is restored), 0 rows wait; `relay quarantine resume 1` ends that")
    assert status["state"] == "degraded"
    assert probed.out == "asked for a probe of 0 routes\n"
    assert (asked.code, asked.err) == (
        2, "relay: paused, so not tried: route 1; `relay quarantine resume` tries it\n",
    )  # fmt: skip
    assert (resumed.code, resumed.out) == (0, "resumed route 1, exchange '', routing key 'later'\n")
    assert (after["paused_at"], after["reason"]) == (None, "was paused; resumed by bob")
    assert rows.connection.execute(AUDIT).fetchall() == [
        ("quarantine pause", "exchange '', routing key 'later'", "ada", "billing is restored"),
        ("quarantine resume", "exchange '', routing key 'later'", "bob", None),
    ]


def test_a_pause_is_no_failure_and_keeps_the_reason_of_a_fault(relay: Command, rows: Rows) -> None:
    rows.quarantined("gone")
    failing = json.loads(relay("failures", "list", "-o", "json").out)

    relay("quarantine", "pause", "", "gone", *MINE)
    (paused,) = json.loads(relay("quarantine", "list", "-o", "json").out)
    failures = json.loads(relay("failures", "list", "-o", "json").out)
    relay("quarantine", "resume", "1", *MINE)
    (resumed,) = json.loads(relay("quarantine", "list", "-o", "json").out)

    assert len(failing) == 1
    assert failures == []
    assert [each["reason"] for each in (paused, resumed)] == ["312 NO_ROUTE", "312 NO_ROUTE"]
    assert (paused["rows"], paused["paused_by"], resumed["paused_by"]) == (1, "ada", None)


def test_a_lane_is_paused_listed_and_resumed(relay: Command, rows: Rows) -> None:
    rows.node(lanes=list(range(16)))

    paused = relay("lanes", "pause", "7", *MINE)
    listed = relay("lanes", "list").out.splitlines()
    status = json.loads(relay("status", "-o", "json").out)
    resumed = relay("lanes", "resume", "7", *MINE, "-o", "json")

    assert (paused.code, paused.out) == (0, "paused lane 7\n")
    assert listed[7] == "6\trelay-1\t\t\t"
    assert listed[8].startswith("7\trelay-1\t20")
    assert listed[8].endswith("Z\tada\tbilling is restored")
    assert [lane["lane"] for lane in status["paused_lanes"]] == [7]
    (reason,) = status["reasons"]
    assert reason.startswith("lane 7 is paused by ada since ")
    assert reason.endswith(" (billing is restored); `relay lanes resume 7` ends that")
    assert json.loads(resumed.out)["paused_at"] is None
    assert [row[:2] for row in rows.connection.execute(AUDIT)] == [
        ("lanes pause", "lane 7"),
        ("lanes resume", "lane 7"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["quarantine", "pause", "", "later"], 2, "--why is needed"),
        (
            ["quarantine", "pause", "", "held", "--why", "x"],
            2,
            "route 1 is paused already, by ada: billing is restored",
        ),
        (["quarantine", "pause", "", "é" * 200, "--why", "x"], 2, "longer than the 255 bytes that AMQP allows"),
        (["quarantine", "resume", "2"], 2, "route 2 is not paused: the relays try it by themselves"),
        (["quarantine", "resume", "7"], 1, "no route 7 is in quarantine"),
        (["lanes", "pause", "3"], 2, "--why is needed"),
        (["lanes", "pause", "16", "--why", "x"], 2, "there is no lane 16: they are numbered from 0 to 15"),
        (["lanes", "pause", "5", "--why", "x"], 2, "lane 5 is paused already, by ada: billing is restored"),
        (["lanes", "resume", "3"], 2, "lane 3 is not paused"),
    ],
)
def test_what_cannot_be(relay: Command, rows: Rows, arguments: list[str], code: int, words: str) -> None:
    relay("quarantine", "pause", "", "held", *MINE)
    relay("lanes", "pause", "5", *MINE)
    rows.quarantined("gone")

    result = relay(*arguments)

    assert (result.code, words in result.err) == (code, True), result.err
