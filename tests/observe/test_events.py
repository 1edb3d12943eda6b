"""docs/events.md lists the events that the code logs, with their levels and keys, and no others."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from relay.observe.log import LIBRARIES, OTHER_LIBRARY
from relay.runtime.health import EVENTS

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error"}
ITEM = re.compile(r"^- (`[a-z_.]+`(?:, `[a-z_.]+`)*) \((\w+(?:, \w+)*)(?:: ([^)]*))?\): ", re.MULTILINE)


def logged() -> Iterator[tuple[str, str, set[str]]]:
    """Return each event's name, level and keys, at each place that logs it."""
    for file in (ROOT / "relay").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("log"), level), [name], keywords) if level in LEVELS:
                    keys = {keyword.arg for keyword in keywords if keyword.arg} - {"exc_info"}
                    yield from ((each, level, keys) for each in names(name))
    of_libraries = {*LIBRARIES.values(), OTHER_LIBRARY}
    yield from ((each, level, {"logger", "reason"}) for each in of_libraries for level in ("warning", "error"))


def names(name: ast.expr) -> list[str]:
    match name:
        case ast.Constant(str(text)):
            return [text]
        case ast.Subscript(ast.Subscript(ast.Name("EVENTS")), ast.Constant(int(which))):
            return [events[which] for events in EVENTS.values()]
    raise AssertionError(f"line {name.lineno}: the name of an event is a text")


def documented() -> Iterator[tuple[str, str, set[str]]]:
    """Read the items ``- `event` (level: key, key): words``. Several names have a level each, or all one."""
    for listed, told, keys in ITEM.findall((ROOT / "docs" / "events.md").read_text()):
        events, levels = re.findall(r"[a-z_.]+", listed), told.split(", ")
        pairs = zip(events, levels, strict=True) if len(events) == len(levels) else product(events, levels)
        yield from ((event, level, set(re.findall(r"\w+", keys))) for event, level in pairs)


def test_the_documented_events_are_those_that_are_logged() -> None:
    told, is_logged = list(documented()), list(logged())

    assert {(name, level) for name, level, _ in told} == {(name, level) for name, level, _ in is_logged}
    told_keys, keys = by_name(told), by_name(is_logged)
    assert {name: missing for name in keys if (missing := keys[name] - told_keys[name])} == {}


def by_name(events: Iterable[tuple[str, str, set[str]]]) -> dict[str, set[str]]:
    keys: dict[str, set[str]] = defaultdict(set)
    for name, _, found in events:
        keys[name] |= found
    return keys
