"""Whether the routing keys that a route makes can fit into a message."""

import re
from collections.abc import Iterator

from relay.config.settings import Route, Settings
from relay.operate.doctor.finding import Finding, Verdict

MAX_BYTES = 255  # an AMQP short string
ONE_CHARACTER = re.compile(r"\[!?\]?[^\]]*\]|\?")


def routes(settings: Settings) -> Iterator[Finding]:
    """Look for routes of which each row would be parked, as its routing key is too long."""
    check = "settings.routes"
    too_long = [(route, size) for route in settings.routes if (size := _least_bytes(route)) > MAX_BYTES]
    for route, size in too_long:
        words = (
            f"the route of event_type {route.event_type!r} and aggregate_type {route.aggregate_type!r} makes routing"
            f" keys of at least {size} bytes; the limit is {MAX_BYTES}. No such row can be sent"
        )
        yield Finding(check, Verdict.FAILED, words, "shorten its routing_key")
    if not too_long:
        yield Finding(check, Verdict.OK, f"each route can make routing keys of at most {MAX_BYTES} bytes")


def _least_bytes(route: Route) -> int:
    """Return how long a routing key of this route is at least."""
    shortest = {
        "{event_type}": _shortest(route.event_type),
        "{aggregate_type}": _shortest(route.aggregate_type),
        "{aggregate_id}": "",
    }
    key = re.sub("|".join(map(re.escape, shortest)), lambda found: shortest[found[0]], route.routing_key)
    return len(key.encode())


def _shortest(pattern: str) -> str:
    """Return a text as short as the shortest that a shell pattern matches."""
    return ONE_CHARACTER.sub("x", pattern).replace("*", "")
