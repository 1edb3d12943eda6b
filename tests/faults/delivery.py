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
    """What was committed is in a queue, or where an operator sees it."""
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
    """What was rolled back, or never written, is nowhere; what is unknown is at both ends or at none."""
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
    """In each queue the first deliveries of a key ascend, and nothing follows a parked one that holds its key.

    By key, nothing leaves before its predecessor has been confirmed: where the broker refused the one it may take
    the other, so that even queues in order would be luck.
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
    """Each delivery is as it was written, and a repeat has a reason, after which it says that it is one."""
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
    """A message goes out again only if the answer to the first may not have come, or was no; and unchanged."""
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
    """Say where and when a message was sent, and what became of that."""
    sent = publication.sent
    place = f"{sent.relay} connection {sent.connection} channel {sent.channel} at {sent.at:.3f}"
    return f"{place}, {publication.fate} at {publication.ended_at:.3f}"


def _too_early(publications: Iterable[Publication], places: dict[UUID, Written], excused: set[UUID]) -> Iterator[str]:
    """Give what was sent while an earlier message of its key had been sent and not been confirmed.

    What one relay sends after another one's was confirmed comes too late to matter: it was in its socket.
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
    """Give the messages that the others of their key need not wait for: given up, or refused and passed over."""
    given_up = {row.message_id for row in evidence.rows if row.state in GIVEN_UP}
    refused = {one.sent.message_id for one in publications if one.fate in (Fate.RETURNED, Fate.REFUSED)}
    return given_up if evidence.holds else given_up | refused


def _is_left_behind(written: Written, evidence: Evidence, arrived: set[UUID]) -> bool:
    """Something written later has arrived, and then nothing was published for a while."""
    sent_at = [record.at for record in evidence.history if isinstance(record, Published)]
    overtaken = any(one.at > written.at and one.message_id in arrived for one in _written(evidence))
    return overtaken and bool(sent_at) and max(sent_at) < evidence.looked_at - QUIET


def _parked_heads(evidence: Evidence, places: dict[UUID, Written]) -> dict[str, int]:
    """Give the lowest parked number of each key; nothing while parked rows are passed over."""
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
    """Give what was committed; where the writer does not know, its business row tells, or else the table."""
    there = evidence.business if evidence.business is not None else {row.message_id for row in evidence.rows}
    for written in _written(evidence):
        if written.ending is Ending.COMMITTED or (written.ending is Ending.UNKNOWN and written.message_id in there):
            yield written


def _firsts(deliveries: Iterable[Delivered]) -> dict[str, dict[UUID, None]]:
    """Give the messages of each queue, each once, in the order in which they came first."""
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
