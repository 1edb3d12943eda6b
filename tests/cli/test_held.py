"""`relay held`: the consumers try now what they hold."""

import json

from tests.cli.command import Command
from tests.operate.held import held
from tests.operate.rows import Rows


def test_a_group_is_tried_now_and_the_audit_says_why(relay: Command, rows: Rows) -> None:
    held(rows.connection, "a", messages=3)
    (group,) = [each["id"] for each in json.loads(relay("failures", "list", "--held", "--output", "json").out)]

    shown = relay("failures", "show", group, "--held").out
    without_reason = relay("held", "retry", "--group", group)
    nothing_chosen = relay("held", "retry", "--why", "mended")
    tried = relay("held", "retry", "--group", group, "--why", "mended", "--by", "ada")
    again = relay("held", "retry", "--all", "--why", "mended", "--output", "json")
    unknown = relay("held", "retry", "--group", "0123456789ab", "--why", "mended")

    assert f"relay held retry --group {group}" in shown
    assert (without_reason.code, nothing_chosen.code) == (2, 2)
    assert (tried.code, tried.out) == (0, "1 message will be tried within seconds\n")
    assert json.loads(again.out) == {"messages": 0}  # it is due already
    assert (unknown.code, "no message of failure group" in unknown.err) == (1, True)
    audit = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("held retry", group, "ada", "mended")]


def test_held_messages_are_listed_by_key_in_order(relay: Command, rows: Rows) -> None:
    held(rows.connection, "a", messages=2)
    held(rows.connection, "b", consumer="mail", error="no paper")

    shown = [line.split("\t") for line in relay("held", "list").out.splitlines()]
    told = json.loads(relay("held", "list", "--consumer", "billing", "-o", "json").out)
    first = json.loads(relay("held", "list", "--limit", "1", "-o", "json").out)

    assert [(line[0], line[1], line[4]) for line in shown[1:]] == [
        ("billing", "a", "3"),
        ("billing", "a", "0"),
        ("mail", "b", "3"),
    ]
    assert shown[3][-1] == "ConnectionError: no paper"
    assert [(each["attempts"], each["due_at"] is None) for each in told] == [(3, False), (0, True)]
    assert set(told[0]) == {
        "consumer", "key", "message_id", "event_type", "attempts", "held_at", "due_at", "error",
    }  # fmt: skip
    assert first == told[:1]
