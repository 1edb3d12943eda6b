"""The busiest routes and event types on the overview, and the curve of the one that is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import urlencode

from relay.console.formats import short
from relay.console.history import Busy, EventType, Name, SentHour, SentRoute
from relay.console.live import Figure, figure

LISTED = 8  # routes, and event types


@dataclass(frozen=True, slots=True)
class BusyLine:
    """One of the busiest, with the address of the overview that shows its curve."""

    id: str  # of the link, which keeps the focus of the keyboard
    words: str
    address: str
    messages: float
    rate: float | None
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """The busiest of a kind."""

    head: str
    lines: Sequence[BusyLine]


@dataclass(frozen=True, slots=True)
class SentCurves:
    """What the overview shows.

    Attributes:
        address: of the overview with this choice, below the console's path.
        figure: None when nothing was sent; `is_missing`: when that is so of the choice alone.
    """

    address: str
    lists: Sequence[Listed]
    figure: Figure | None
    is_missing: bool


def sent_curves(hour: SentHour, chosen: Name | None) -> SentCurves:
    """Return the lists, and the curve of the choice; of the busiest event type without one."""
    known = {each.name: each for each in (*hour.types, *hour.routes)}
    shown = chosen if chosen is not None else next(iter(known), None)
    busy = known.get(shown) if shown is not None else None
    lists = [
        Listed(head, [_line(each, shown) for each in busiest[:LISTED]])
        for head, busiest in (("Event type", hour.types), ("Route", hour.routes))
        if busiest
    ]
    return SentCurves(
        "" if chosen is None else _address(chosen),
        lists,
        None if busy is None else _figure(busy, hour),
        is_missing=chosen is not None and busy is None,
    )


def _figure(busy: Busy, hour: SentHour) -> Figure:
    values = [(each.at, each.rate(busy.name)) for each in hour.sent]
    return figure(_words(busy.name), short(busy.rate), "messages a second", values, words=short)


def _line(busy: Busy, shown: Name | None) -> BusyLine:
    address = _address(busy.name)
    return BusyLine(
        f"sent-{sha256(address.encode()).hexdigest()[:12]}",
        _words(busy.name),
        address,
        busy.messages,
        busy.rate,
        busy.name == shown,
    )


def _words(name: Name) -> str:
    match name:
        case EventType(words):
            return words
        case SentRoute(exchange, routing_key):
            return f"{exchange or '(default)'} → {routing_key}"


def _address(name: Name) -> str:
    return f"?{urlencode(name._asdict() if isinstance(name, SentRoute) else {'event_type': name.name})}"
