"""Log events that a test has captured."""

from collections.abc import MutableMapping, Sequence
from typing import Any

Events = Sequence[MutableMapping[str, Any]]


def named(events: Events, name: str) -> Events:
    """Return the events of this name, in their order."""
    return [event for event in events if event["event"] == name]


def times(events: Events, name: str) -> int:
    """Return how often an event of this name was logged."""
    return len(named(events, name))


def assert_told_once(events: Events, part: str) -> None:
    """Check that each reason of a degraded part is logged once until the part has healed, and that it has healed."""
    told: list[object] = []
    for event in events:
        if event["event"] == f"{part}.degraded":
            told.append(event["reason"])
            assert told.count(event["reason"]) == 1
        elif event["event"] == f"{part}.healed":
            assert told
            told.clear()
    assert times(events, f"{part}.healed") > 0
    assert not told
