"""Print dead letters: their list, one of them, its body."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from relay.cli.printing import print_pairs, print_table, say
from relay.observe.printable import printable
from relay.operate.dead_letters.document import json_of
from relay.operate.dead_letters.letter import Letter

PREVIEW = 1000  # bytes of a body that is not JSON
LIST_COLUMNS = (
    "position",
    "message id",
    "type",
    "key",
    "reason",
    "exception",
    "attempts",
    "first failure",
    "last failure",
    "consumer",
)


def print_letters(letters: Sequence[Letter]) -> None:
    """Print a line for each."""
    # `show` has the rest; on a terminal the exception needs its room.
    left_out = {"first failure", "consumer"} if sys.stdout.isatty() else set()
    kept = [index for index, column in enumerate(LIST_COLUMNS) if column not in left_out]
    rows = [[_row(letter)[index] for index in kept] for letter in letters]
    print_table([LIST_COLUMNS[index] for index in kept], rows)


def print_letter(letter: Letter, told: dict[str, Any]) -> None:
    """Print what it tells of itself, and the properties and headers of its document."""
    facts = [(name.replace("_", " "), getattr(letter, name)) for name in Letter.__dataclass_fields__]
    for kind, named in (("property", told["properties"]), ("header", told["headers"])):
        facts += [(f"{kind} {name}", value) for name, value in named.items()]
    print_pairs(facts)


def print_body(body: bytes) -> None:
    """Print JSON indented, and of anything else the begin; nothing in it moves the cursor of a terminal."""
    value = json_of(body)
    if value is None:
        say(f"body of {len(body)} bytes, not JSON: {printable(body[:PREVIEW].decode(errors='backslashreplace'))}")
        return
    for line in orjson.dumps(value, option=orjson.OPT_INDENT_2).decode().splitlines():
        say(printable(line))


def _row(letter: Letter) -> tuple[object, ...]:
    return (
        letter.position,
        letter.message_id,
        letter.type,
        letter.key,
        letter.reason,
        letter.exception,
        letter.attempts,
        _moment(letter.first_failed_at),
        _moment(letter.last_failed_at),
        letter.consumer,
    )


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
