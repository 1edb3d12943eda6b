"""`relay dead-letters`, as a user and as a program reads it."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.consume.classify import FailureReason
from relay.consume.failed.envelope import unpack
from tests.cli.command import Command, Result
from tests.consume.effects import QUEUE
from tests.dead_letters.changes import Audit
from tests.dead_letters.letters import DEAD, Letters
from tests.dead_letters.tried import consuming
from tests.support.eventually import eventually

WHY = ("--why", "the tax office is open again")


class DeadLettersCommand:
    """The command outside of the loop of a test."""

    def __init__(self, command: Command) -> None:
        self.command = command

    async def __call__(self, *arguments: str, **variables: str) -> Result:
        return await asyncio.to_thread(self.command, "dead-letters", *arguments, **variables)

    async def process(self, *arguments: str, **variables: str) -> Result:
        """As a separate process, for a command that takes signals."""
        return await asyncio.to_thread(self.command.process, "dead-letters", *arguments, **variables)


@pytest.fixture
def relay(tmp_path: Path, database_url: str, broker_url: str) -> DeadLettersCommand:
    return DeadLettersCommand(Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url))


async def test_list_as_a_table_and_as_json(letters: Letters, relay: DeadLettersCommand) -> None:
    message_id = await letters.put(reason=FailureReason.UNHANDLED, exception="ev\x1b[31mil")
    await letters.put(2, key="b")

    table = await relay("list", QUEUE)
    await eventually(lambda: letters.has(2), "both are back")
    told = await relay("list", DEAD, "--output", "json", "--limit", "1")

    lines = [line.split("\t") for line in table.out.splitlines()]
    assert table.code == 0
    assert lines[0][:5] == ["position", "message id", "type", "key", "reason"]
    assert lines[1][:6] == ["1", message_id, "Counted", "counter/a", "unhandled", "ev\\x1b[31mil: not today"]
    assert lines[1][6:] == ["5", "2026-11-21 08:00:00Z", "2026-11-21 08:00:00Z", "projection"]
    document = json.loads(told.out)
    assert (document["queue"], document["messages"], len(document["letters"])) == (DEAD, 2, 1)
    assert document["letters"][0]["last_failed_at"] == "2026-11-21T08:00:00+00:00"
    assert "the first 1 that match, of a queue with 2: --limit lists more" in told.err


async def test_show_has_all_of_it(letters: Letters, relay: DeadLettersCommand) -> None:
    message_id = await letters.put(
        body=b'{"a": "\\u001b", "b": [1]}', properties={"priority": 3}, headers={"traceparent": "00-1"}
    )
    await letters.put(message_id="binary", body=b"\x00\x1b\xff")

    shown = await relay("show", QUEUE, message_id)
    await eventually(lambda: letters.has(2), "both are back")
    binary = await relay("show", QUEUE, "binary")
    gone = await relay("show", QUEUE, "gone")

    assert shown.code == 0
    for line in (
        "routing key\tcounter.Counted",
        "property priority\t3",
        "header traceparent\t00-1",
        '  "a": "\\u001b",',
    ):
        assert line in shown.out.splitlines()
    assert "\x1b" not in shown.out + binary.out
    assert "body of 3 bytes, not JSON: \\x00\\x1b\\xff" in binary.out
    assert (gone.code, gone.err.count("\n")) == (1, 1)


async def test_retry_prints_what_it_did_and_what_stays(
    letters: Letters, relay: DeadLettersCommand, audit: psycopg.Connection[psycopg.rows.DictRow]
) -> None:
    await letters.put(message_id="one")
    await letters.put(message_id="two")

    dry = await relay("retry", QUEUE, "--all", "--dry-run")
    await eventually(lambda: letters.has(2), "both are back")
    partly = await relay.process("retry", QUEUE, "one", "gone", *WHY, "--by", "ann")
    await eventually(lambda: letters.has(1), "the other one is back")
    rest = await relay.process("retry", QUEUE, "--all", *WHY, "--output", "json", RELAY_OPERATOR="team billing")

    assert (dry.code, dry.out) == (0, f"would retry 2 letters of {DEAD} into {QUEUE}\n")
    assert (partly.code, partly.out) == (3, f"sent 1 letter of {DEAD} into {QUEUE}\n")
    assert partly.err == (
        f"relay: gone is not there, or is with another consumer: see `relay dead-letters list {DEAD}`\n"
    )
    assert (rest.code, json.loads(rest.out)["done"]) == (0, 1)
    assert [message.message_id for message in await letters.consumed()] == ["one", "two"]
    done_by = audit.execute("SELECT done_by FROM outbox.dead_letter_audit ORDER BY id").fetchall()
    assert [row["done_by"] for row in done_by] == ["ann", "team billing"]


async def test_a_retry_that_the_queue_refuses_is_an_error(letters: Letters, relay: DeadLettersCommand) -> None:
    await letters.channel.queue_delete(QUEUE)
    full: dict[str, Any] = {"x-queue-type": "classic", "x-max-length": 0, "x-overflow": "reject-publish"}
    await letters.channel.queue_declare(QUEUE, durable=True, arguments=full)
    await letters.put(message_id="one")

    refused = await relay.process("retry", QUEUE, "--all", *WHY)

    assert (refused.code, refused.out) == (1, f"sent 0 letters of {DEAD} into {QUEUE}\n")
    assert refused.err.startswith("relay: one stays: queue billing refused it (basic.nack): it is full")


async def test_a_dry_run_finds_that_letters_have_no_queue_to_go_to(letters: Letters, relay: DeadLettersCommand) -> None:
    await letters.put()
    await letters.channel.queue_delete(QUEUE)

    dry = await relay("retry", QUEUE, "--all", "--dry-run")

    assert (dry.code, dry.out) == (1, "")
    assert dry.err.startswith(f"relay: queue '{QUEUE}' does not exist")


async def test_retry_in_stages_says_why_it_pauses_and_what_failed(
    letters: Letters, relay: DeadLettersCommand, audit: Audit
) -> None:
    await letters.put_all(3)

    async with consuming(letters, audit, fails=lambda _: True):
        paused = await relay.process(
            "retry", letters.queue.name, "--all", *WHY, "--stages", "1,all", "--stop-when-failing", "5%"
        )
        told = await relay.process("retry", letters.queue.name, "id-1", *WHY, "--stages", "1,all")

    assert (paused.code, paused.out) == (3, f"sent 1 letter of {letters.queue.name}.dead into {letters.queue.name}\n")
    assert "job 1 is paused: letters that failed while a stage of 1 was tried: 1, or 100%, and at most" in paused.err
    assert "`relay jobs resume 1` goes on" in paused.err
    assert told.code == 1
    assert "letters that failed while stages were tried: 1; see `relay dead-letters list billing.dead`" in told.err


async def test_discard_asks_where_somebody_can_be_asked(
    letters: Letters, relay: DeadLettersCommand, audit: psycopg.Connection
) -> None:
    await letters.put_all(3)

    unasked = await relay.process("discard", QUEUE, "--all", *WHY)
    done = await relay.process("discard", QUEUE, "--reason", "exhausted", "--limit", "2", *WHY, "--yes")

    assert (unasked.code, "--yes does it unasked" in unasked.err) == (2, True)
    assert (done.code, done.out) == (0, f"threw away 2 letters of {DEAD}\n")
    await eventually(lambda: letters.has(1), "the other one is back")
    assert await letters.ids() == ["id-2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("retry", QUEUE, *WHY), "give message ids, a filter such as --group or --event-type, or --all"),
        (
            ("retry", QUEUE, "--limit", "3", *WHY),
            "give message ids, a filter such as --group or --event-type, or --all",
        ),
        (("discard", QUEUE, "one", "--all", *WHY), "--all and a filter exclude each other"),
        (("retry", QUEUE, "--all"), "--why is needed"),
        (("list", QUEUE, "--since", "yesterday"), "--since takes a moment"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused(
    relay: DeadLettersCommand, arguments: tuple[str, ...], words: str
) -> None:
    refused = await relay(*arguments)

    assert refused.code == 2
    assert words in refused.err


async def test_servers_that_are_away_are_one_line_with_the_remedy(letters: Letters, relay: DeadLettersCommand) -> None:
    await letters.put()
    retry = ("retry", QUEUE, "--all", *WHY)

    no_broker = await relay("list", QUEUE, RELAY_BROKER_URL="amqp://relay:hunter2@127.0.0.1:9/")
    no_database = await relay.process(*retry, RELAY_DATABASE_URL="postgresql://relay:hunter2@127.0.0.1:9/outbox")
    no_queue = await relay("list", "other")

    for result, words in (
        (no_broker, "in broker.url"),
        (no_database, "in database.url"),
        (no_queue, "queue 'other.dead' does not exist"),
    ):
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert words in result.err
    assert await letters.queue.ready_count() == 0
    await eventually(lambda: letters.has(1), "it stays")


async def test_an_export_holds_all_of_each_letter(letters: Letters, relay: DeadLettersCommand, tmp_path: Path) -> None:
    headers = {"number": 2**40, "flag": True, "raw": bytearray(b"\xff"), "nested": {"list": [1, "two"]}}
    bodies = [b'{"a":  9.90}', b'{\n"a": 1}', b"\x00\xff", b"", b"null"]
    for number, body in enumerate(bodies):
        await letters.put(message_id=str(number), body=body, headers=headers, properties={"priority": 3})

    saved = await relay("export", QUEUE, "letters.jsonl")
    again = await relay("export", QUEUE, "letters.jsonl")
    await eventually(lambda: letters.has(5), "all are back")
    other = await relay("export", QUEUE, "letters.jsonl", "--overwrite", "2")

    assert (saved.code, saved.out) == (0, f"saved 5 letters of {DEAD} in letters.jsonl\n")
    assert (again.code, "letters.jsonl exists: name another file, or add --overwrite" in again.err) == (2, True)
    assert (other.code, len((tmp_path / "letters.jsonl").read_text().splitlines())) == (0, 1)
    await eventually(lambda: letters.has(5), "all are back")
    piped = await relay.process("export", QUEUE, "-")
    lines = piped.out.splitlines()
    assert '"body":{"a":  9.90}' in lines[0]
    documents = [json.loads(line) for line in lines]
    assert [sorted(name for name in each if name.startswith("body")) for each in documents] == [
        ["body"],
        *[["body_base64"]] * 3,
        ["body_base64"],
    ]
    assert [base64.b64decode(each["body_base64"]) for each in documents[1:]] == bodies[1:]
    await eventually(lambda: letters.has(5), "all are back")
    taken = await letters.taken()
    counts = dict.fromkeys(("x-delivery-count", "x-acquired-count"), 0)  # the broker's, of each look
    for document, letter in zip(documents, taken, strict=True):
        envelope = unpack(base64.b64decode(document["envelope"]), b"", exchange="", routing_key="")
        came = envelope.header.properties
        assert (came.message_id, came.priority, came.message_type) == (letter.message_id, 3, "Counted")
        assert {**(came.headers or {}), **counts} == {**letter.headers, **counts}
        assert document["headers"]["nested"] == {"list": [1, "two"]}


async def test_an_export_that_fails_leaves_no_file(relay: DeadLettersCommand, tmp_path: Path) -> None:
    failed = await relay("export", "other", "letters.jsonl")

    assert failed.code == 1
    assert os.listdir(tmp_path) == []
