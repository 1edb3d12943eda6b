"""What became of each publish that passed the recorder."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from tests.faults.history import Acked, Closed, History, Nacked, Published, Returned

# What the broker says of a message or its address, and not of its state: too large, forbidden, missing,
# a failed precondition, malformed frames. Such a close may burn an attempt of what was in flight.
REFUSALS = {311, 403, 404, 406, 501, 502, 503, 505}


class Fate(StrEnum):
    """How a publish ended, as the recorder saw it."""

    ACKED = "acked"
    NACKED = "nacked"
    RETURNED = "returned"  # the ack that follows a return says nothing
    REFUSED = "refused"  # the broker closed its channel with a refusal
    LOST = "lost"  # its channel or connection ended before an answer passed
    OPEN = "open"  # there was no end yet


@dataclass(slots=True)
class Publication:
    """A publish and its end."""

    sent: Published
    fate: Fate = Fate.OPEN
    ended_at: float = inf


def fates(history: History) -> list[Publication]:
    """Return every publish, in the order in which they passed.

    The broker ignores what comes on a connection or channel that it has closed, until the number is that of a new
    channel.
    """
    publications: list[Publication] = []
    closed: dict[tuple[int, int | None], Closed] = {}  # by connection and channel; None: all of them
    under_way: defaultdict[tuple[int, int], dict[int, Publication]] = defaultdict(dict)  # channel -> tag -> publish
    for record in history:
        match record:
            case Published():
                publication = Publication(record)
                publications.append(publication)
                place = (record.connection, record.channel)
                if record.tag == 1:
                    closed.pop(place, None)
                if (close := closed.get((record.connection, None)) or closed.get(place)) is not None:
                    _end([publication], _fate_of(close), record.at)
                else:
                    under_way[place][record.tag] = publication
            case Acked() | Nacked():
                fate = Fate.ACKED if isinstance(record, Acked) else Fate.NACKED
                _end(_answered(under_way[record.connection, record.channel], record), fate, record.at)
            case Returned():
                of_channel = under_way[record.connection, record.channel]
                tags = [tag for tag, one in of_channel.items() if one.sent.outbox_id == record.outbox_id]
                _end([of_channel.pop(tag) for tag in tags[:1]], Fate.RETURNED, record.at)
            case Closed():
                closed.setdefault((record.connection, record.channel), record)
                for place in list(under_way):
                    if place[0] == record.connection and record.channel in (None, place[1]):
                        _end(under_way.pop(place).values(), _fate_of(record), record.at)
            case _:
                pass  # not about a publish
    return publications


def by_message(publications: Iterable[Publication]) -> dict[int, list[Publication]]:
    """Return the publishes of each row by its outbox id, in order."""
    of_message: defaultdict[int, list[Publication]] = defaultdict(list)
    for publication in publications:
        of_message[publication.sent.outbox_id].append(publication)
    return of_message


def _fate_of(close: Closed) -> Fate:
    return Fate.REFUSED if close.code in REFUSALS else Fate.LOST


def _answered(of_channel: dict[int, Publication], answer: Acked | Nacked) -> list[Publication]:
    if not answer.multiple:
        return [of_channel.pop(answer.tag)] if answer.tag in of_channel else []
    return [of_channel.pop(tag) for tag in list(of_channel) if tag <= answer.tag]


def _end(publications: Iterable[Publication], fate: Fate, at: float) -> None:
    for publication in publications:
        publication.fate, publication.ended_at = fate, at
