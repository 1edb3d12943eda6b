"""`relay parked edit`: an edited copy of a parked row, from files."""

import json
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows

WHY = ("--why", "a wrong amount")


@pytest.fixture
def payload(tmp_path: Path) -> str:
    file = tmp_path / "corrected.json"
    file.write_text('{"amount": 1.10}\n')
    return str(file)


def test_a_dry_run_shows_what_changes_and_changes_nothing(relay: Command, rows: Rows, payload: str) -> None:
    row = rows.parked(payload='{"amount":110}')

    told = relay("parked", "edit", str(row), "--payload", payload, "--discard", "--dry-run")

    assert (told.code, told.out) == (0, f"would send an edited copy of {row} and discard it\n")
    assert '-  "amount": 110\n+  "amount": 1.10\n' in told.err
    assert rows.states() == {row: ("parked", None)}


def test_a_copy_is_sent_with_the_bytes_of_the_file(relay: Command, rows: Rows, payload: str, tmp_path: Path) -> None:
    row = rows.parked(payload='{"amount":110}', headers='{"tenant": "acme"}')
    (tmp_path / "headers.json").write_text('{"tenant": "b"}')

    done = relay(
        "parked", "edit", str(row), "--payload", payload, "--headers", "headers.json", "--discard", "--yes", *WHY,
        "--by", "ada", "--output", "json",
    )  # fmt: skip

    assert done.code == 0, done
    told = json.loads(done.out)
    (copy,) = rows.connection.execute("SELECT id, payload::text, headers FROM outbox.message WHERE state = 'pending'")
    assert copy == (told["id"], '{"amount": 1.10}\n', {"tenant": "b", "x-edit-of": told["edit_of"]})
    assert rows.states()[row] == ("discarded", None)
    audit = rows.connection.execute("SELECT command, done_by FROM outbox.operator_audit ORDER BY id").fetchall()
    assert audit == [("parked edit", "ada"), ("parked discard", "ada")]


def test_bytes_that_are_no_text_are_sent_as_they_are(relay: Command, rows: Rows, tmp_path: Path) -> None:
    row = rows.parked(payload=None, payload_bytes=b"old")
    (tmp_path / "new.bin").write_bytes(b"\x00\xff")

    done = relay("parked", "edit", str(row), "--payload", "new.bin", "--yes", *WHY)

    assert done.code == 0, done
    assert f"{row} stays parked" in done.out
    (copy,) = rows.connection.execute("SELECT payload_bytes FROM outbox.message WHERE state = 'pending'")
    assert copy == (b"\x00\xff",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--yes", *WHY], "give --payload, --headers, or both"),
        (["--payload", "nowhere.json", "--yes", *WHY], "--payload nowhere.json: No such file"),
        (["--headers", "corrected.json", "--yes"], "--why is needed"),
        (["--payload", "corrected.json", *WHY], "--yes does it unasked"),
        (["--payload", "broken.json", "--yes", *WHY], "payload is not JSON"),
        (["--headers", "broken.json", "--yes", *WHY], "the headers are not JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    relay: Command, rows: Rows, payload: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    row = rows.parked()
    (tmp_path / "broken.json").write_text('{"amount": 1,}')

    refused = relay("parked", "edit", str(row), *arguments)

    assert refused.code == 2, refused
    assert words in refused.err
    assert Path(payload).exists()
    assert rows.states() == {row: ("parked", None)}
