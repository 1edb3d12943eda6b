"""docs/events.md lists the events that the code logs, with their keys, and no others."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error"}
PARTS = ("broker", "queues", "database", "lanes")  # of relay/engine/health.py, which puts the name together


def logged() -> Iterator[tuple[str, set[str]]]:
    """Give each event's name and keys, at each place that logs it."""
    for file in (ROOT / "relay").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("log"), level), [name], keywords) if level in LEVELS:
                    keys = {keyword.arg for keyword in keywords if keyword.arg} - {"exc_info"}
                    yield from ((each, keys) for each in names(name))


def names(name: ast.expr) -> list[str]:
    match name:
        case ast.Constant(str(text)):
            return [text]
        case ast.JoinedStr([ast.FormattedValue(), ast.Constant(str(end))]):
            return [part + end for part in PARTS]
    raise AssertionError(f"line {name.lineno}: the name of an event is a text")


def documented() -> dict[str, set[str]]:
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|", (ROOT / "docs" / "events.md").read_text(), re.MULTILINE)
    events: dict[str, set[str]] = defaultdict(set)
    for event, keys in rows:
        for name in re.findall(r"`([a-z_.]+)`", event):
            events[name] |= set(re.findall(r"\w+", keys))
    return events


def test_the_documented_events_are_those_that_are_logged() -> None:
    events: dict[str, set[str]] = defaultdict(set)
    for name, keys in logged():
        events[name] |= keys

    assert sorted(documented()) == sorted(events)
    assert {name: missing for name in events if (missing := events[name] - documented()[name])} == {}
