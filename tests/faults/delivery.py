"""From the writers to the queues: nothing lost, nothing invented, in order, and the same message each time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from uuid import UUID

from tests.faults.evidence import GIVEN_UP, QUIET, SETTLED, Delivered, Evidence, NoDataError
from tests.faults.fates import Fate, Publication, by_message, fates
from tests.faults.history import Ending, Published, Written
from tests.faults.injections import Fault, faults

AFTERMATH = 5.0  # seconds after the heal until everyone has found out what was lost


def lost(evidence: Evidence) -> Iterator[str]:
    """Find messages that were committed, and are neither in a queue nor where an operator sees them."""
    arrived = {one.message_id for one in evidence.deliveries}
    rows = {row.message_id: row for row in evidence.rows}
    for written in _committed(evidence):
        row = rows.get(written.message_id)
        if written.message_id in arrived or (row and row.state in GIVEN_UP):
            continue
        if row is None:
            yield f"{_name(written)}: neither in a queue nor in the table"
        elif row.state in SETTLED:
            yield f"{_name(written)}: {row.state}, but in no queue"
        elif (
            evidence.patient
            and row.state == "pending"
            and not row.delayed
            and _is_left_behind(written, evidence, arrived)
        ):
            yield f"{_name(written)}: pending, overtaken, and nobody moves any more"


def invented(evidence: Evidence) -> Iterator[str]:
    """Find messages that were rolled back or never written. An unknown commit is at both ends, or at neither."""
    written = {one.message_id: one for one in _written(evidence)}
    seen = {one.message_id for one in evidence.deliveries}
    seen |= {record.message_id for record in evidence.history if isinstance(record, Published)}
    seen |= {row.message_id for row in evidence.rows}
    for message_id in seen:
        if message_id not in written:
            yield f"{message_id} was never written"
        elif written[message_id].ending is Ending.FORGOTTEN:
            continue
        elif written[message_id].ending is Ending.ROLLED_BACK:
            yield f"{_name(written[message_id])}: was rolled back"
        elif evidence.business is not None and message_id not in evidence.business:
            yield f"{_name(written[message_id])}: its business row is not there"
    for message_id in (evidence.business or frozenset()) - seen:
        yield f"{message_id}: its business row is there, the message is not"


def reordered(evidence: Evidence) -> Iterator[str]:
    """Find keys out of order in a queue, by first deliveries, and rows that follow a parked one that holds its key.

    With ordering by key, nothing leaves before its predecessor is confirmed. If it did, the broker could refuse the
    first and accept the second, and queues in order would be luck.
    """
    places = {one.message_id: one for one in _written(evidence) if one.key is not None and one.number is not None}
    if not places:
        raise NoDataError("no writer asked for an order")
    publications = fates(evidence.history)
    parked, excused = _parked_heads(evidence, places), _excused(evidence, publications)
    for name, messages in _firsts(evidence.deliveries).items():
        highest: defaultdict[str, int] = defaultdict(int)
        for message_id in messages:
            if message_id not in places or message_id in excused:
                continue
            key, number = _place(places[message_id])
            if number < highest[key]:
                yield f"{name}: number {number} of {key} came after number {highest[key]}"
            if number > parked.get(key, number):
                yield f"{name}: number {number} of {key} came although number {parked[key]} is parked"
            highest[key] = max(highest[key], number)
    if evidence.by_key:
        yield from _too_early(publications, places, excused)


def changed(evidence: Evidence) -> Iterator[str]:
    """Find deliveries that differ from what was written, and repeats without a reason or without their header."""
    written = {one.message_id: one for one in _written(evidence) if one.ending is not Ending.FORGOTTEN}
    ids = {row.message_id: row.id for row in evidence.rows}
    for one in evidence.deliveries:
        original = written.get(one.message_id)
        if original is not None and (original.key, original.body) != (one.key, one.body):
            yield f"{_name(original)}: another key or body was delivered to {one.queue}"
        if ids.get(one.message_id, one.outbox_id) != one.outbox_id:
            yield f"{one.message_id}: delivered as row {one.outbox_id}, is row {ids[one.message_id]}"
    injected = faults(evidence.history)
    for publications in by_message(fates(evidence.history)).values():
        for before, again in pairwise(publications):
            yield from _unlike(injected, before, again)


def _unlike(injected: Sequence[Fault], before: Publication, again: Publication) -> Iterator[str]:
    """Return what is wrong with a repeat: it may come only after a missing or negative answer, and unchanged."""
    name = f"row {again.sent.outbox_id}"
    if (before.sent.message_id, before.sent.body) != (again.sent.message_id, again.sent.body):
        yield f"{name}: sent again with another message_id or body"
    forgotten = any(
        fault.forgets
        and fault.hits(before.sent.relay)
        and fault.begun <= again.sent.at
        and before.sent.at <= fault.ended + (AFTERMATH if fault.is_healed else 0)
        for fault in injected
    )
    by_another = before.sent.relay != again.sent.relay
    if by_another and not forgotten:
        yield f"{name}: sent again by {again.sent.relay}, though nothing had happened to {before.sent.relay}"
    if before.ended_at > again.sent.at and not (by_another and forgotten):
        yield f"{name}: sent again while it was under way ({_course(before)}; {_course(again)})"
    if before.fate is Fate.LOST and not forgotten and not again.sent.redelivered:
        yield f"{name}: sent again after an unknown outcome without saying so"
    if before.fate is Fate.ACKED and not forgotten and before.sent.connection == again.sent.connection:
        yield f"{name}: sent again after its confirm"


def _course(publication: Publication) -> str:
    """Return where and when a message was sent, and how the publish ended."""
    sent = publication.sent
    place = f"{sent.relay} connection {sent.connection} channel {sent.channel} at {sent.at:.3f}"
    return f"{place}, {publication.fate} at {publication.ended_at:.3f}"


def _too_early(publications: Iterable[Publication], places: dict[UUID, Written], excused: set[UUID]) -> Iterator[str]:
    """Return messages that were sent before an earlier one of their key was confirmed.

    A relay's frame may leave its socket late, after the next relay's was confirmed; that does not count.
    """
    open_numbers: defaultdict[str, dict[int, list[Publication]]] = defaultdict(dict)  # by key
    confirmed_to: defaultdict[str, dict[int, str]] = defaultdict(dict)  # by key and number
    for publication in publications:
        sent = publication.sent
        if sent.message_id not in places or sent.message_id in excused:
            continue
        key, number = _place(places[sent.message_id])
        of_key = open_numbers[key]
        if confirmed_to[key].get(number, sent.relay) != sent.relay:
            continue
        for earlier in [one for one in of_key if one < number]:
            acked = [one for one in of_key[earlier] if one.fate is Fate.ACKED and one.ended_at <= sent.at]
            if acked:
                confirmed_to[key][earlier] = acked[0].sent.relay
                del of_key[earlier]
            else:
                fate = of_key[earlier][-1].fate
                yield f"number {number} of {key} was sent before number {earlier} was confirmed; that was {fate}"
        of_key.setdefault(number, []).append(publication)


def _excused(evidence: Evidence, publications: Iterable[Publication]) -> set[UUID]:
    """Return the messages that their key need not wait for: given up, or refused and skipped."""
    given_up = {row.message_id for row in evidence.rows if row.state in GIVEN_UP}
    refused = {one.sent.message_id for one in publications if one.fate in (Fate.RETURNED, Fate.REFUSED)}
    return given_up if evidence.holds else given_up | refused


def _is_left_behind(written: Written, evidence: Evidence, arrived: set[UUID]) -> bool:
    """Whether a later message has arrived, and nothing was published for a while since."""
    sent_at = [record.at for record in evidence.history if isinstance(record, Published)]
    overtaken = any(one.at > written.at and one.message_id in arrived for one in _written(evidence))
    return overtaken and bool(sent_at) and max(sent_at) < evidence.looked_at - QUIET


def _parked_heads(evidence: Evidence, places: dict[UUID, Written]) -> dict[str, int]:
    """Return the lowest parked number of each key; empty if parked rows do not hold their key."""
    heads: dict[str, int] = {}
    for row in evidence.rows if evidence.holds else ():
        if row.state == "parked" and row.message_id in places:
            key, number = _place(places[row.message_id])
            heads[key] = min(number, heads.get(key, number))
    return heads


def _written(evidence: Evidence) -> list[Written]:
    written = [record for record in evidence.history if isinstance(record, Written)]
    if not written:
        raise NoDataError("no writer told what it wrote")
    return written


def _committed(evidence: Evidence) -> Iterator[Written]:
    """Return what was committed. If the writer does not know, its business row decides, or else the table."""
    there = evidence.business if evidence.business is not None else {row.message_id for row in evidence.rows}
    for written in _written(evidence):
        if written.ending is Ending.COMMITTED or (written.ending is Ending.UNKNOWN and written.message_id in there):
            yield written


def _firsts(deliveries: Iterable[Delivered]) -> dict[str, dict[UUID, None]]:
    """Return the messages of each queue by their first delivery, each once."""
    firsts: defaultdict[str, dict[UUID, None]] = defaultdict(dict)
    for one in deliveries:
        firsts[one.queue].setdefault(one.message_id)
    return firsts


def _place(written: Written) -> tuple[str, int]:
    assert written.key is not None
    assert written.number is not None
    return written.key, written.number


def _name(written: Written) -> str:
    return f"{written.message_id}, number {written.number} of {written.key}"
