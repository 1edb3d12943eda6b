"""What a faulty relay would leave in the record of a run: each function spoils a faithful record in one way."""

from dataclasses import replace
from uuid import UUID

from tests.faults.evidence import Delivered, Evidence
from tests.faults.history import (
    Acked,
    Closed,
    Ending,
    Healed,
    Measured,
    Nacked,
    Owned,
    Probed,
    Published,
    Returned,
    Written,
    digest,
)


def drop_one(evidence: Evidence) -> None:
    del evidence.deliveries[7]


def drop_the_last(evidence: Evidence) -> None:
    del evidence.deliveries[-1]


def drop_the_row_as_well(evidence: Evidence) -> None:
    """Committed, and in no queue and no table."""
    message_id = evidence.deliveries.pop().message_id
    evidence.rows = [row for row in evidence.rows if row.message_id != message_id]


def deliver_unknown(evidence: Evidence) -> None:
    evidence.deliveries.append(Delivered("all", 7, UUID(int=7), "type/a", digest(b"")))


def deliver_rolled_back(evidence: Evidence) -> None:
    ghost = next(r for r in evidence.history if isinstance(r, Written) and r.ending is Ending.ROLLED_BACK)
    evidence.deliveries.append(Delivered("all", 4, ghost.message_id, None, ghost.body))


def lose_a_business_row(evidence: Evidence) -> None:
    evidence.business = frozenset(list(evidence.business or ())[1:])


def mark_without_a_confirm(evidence: Evidence) -> None:
    evidence.history[:] = [r for r in evidence.history if not (isinstance(r, Acked) and r.at > 30.8)]


def mark_before_the_confirm(evidence: Evidence) -> None:
    evidence.rows[3] = replace(evidence.rows[3], sent_at=(evidence.rows[3].sent_at or 0) - 0.002)


def swap_within_a_key(evidence: Evidence) -> None:
    one, two = [place for place, one in enumerate(evidence.deliveries) if one.key == "type/b"][2:4]
    deliveries = evidence.deliveries
    deliveries[one], deliveries[two] = deliveries[two], deliveries[one]


def deliver_late_but_repeat_early(evidence: Evidence) -> None:
    """The repeat stands in order; the first occurrence does not."""
    evidence.deliveries.insert(0, [one for one in evidence.deliveries if one.key == "type/c"][1])


def send_before_the_predecessor_is_confirmed(evidence: Evidence) -> None:
    """Of a key's second and third message, the third is sent when the second is nacked."""
    of_key = [r for r in evidence.history if isinstance(r, Published) and r.outbox_id % 3 == 0]
    place = evidence.history.index(of_key[1])
    at, next_tag = of_key[1].at, 10_000
    early = replace(of_key[2], at=at + 0.0002, channel=2, tag=1)
    evidence.history[place:place] = [
        replace(of_key[1], at=at - 0.0002, channel=2, tag=next_tag),
        Nacked(0, 2, next_tag, multiple=False, at=at - 0.0001),
        early,
        Nacked(0, 2, 1, multiple=False, at=at + 0.0003),
    ]


def deliver_behind_a_parked_one(evidence: Evidence) -> None:
    place = next(place for place, row in enumerate(evidence.rows) if row.key == "type/a")
    evidence.rows[place] = replace(evidence.rows[place], state="parked", sent_at=None)


def change_a_key(evidence: Evidence) -> None:
    evidence.deliveries[4] = replace(evidence.deliveries[4], key="other")


def change_a_repeat(evidence: Evidence) -> None:
    evidence.deliveries.append(replace(evidence.deliveries[4], body=digest(b"other")))


def send_again_after_the_confirm(evidence: Evidence) -> None:
    place = next(place for place, r in enumerate(evidence.history) if isinstance(r, Acked))
    sent = evidence.history[place - 1]
    assert isinstance(sent, Published)
    at = evidence.history[place].at
    evidence.history[place + 1 : place + 1] = [
        replace(sent, at=at + 0.0001, channel=2, tag=1),
        Acked(0, 2, 1, multiple=False, at=at + 0.0002),
    ]


def send_again_without_saying_so(evidence: Evidence) -> None:
    place = next(place for place, r in enumerate(evidence.history) if isinstance(r, Published))
    sent = evidence.history[place]
    assert isinstance(sent, Published)
    evidence.history[place:place] = [replace(sent, connection=9, at=sent.at - 0.0002), Closed(9, None, at=sent.at)]


def burn_an_attempt_by_a_nack(evidence: Evidence) -> None:
    place = next(place for place, r in enumerate(evidence.history) if isinstance(r, Published))
    sent = evidence.history[place]
    assert isinstance(sent, Published)
    evidence.history[place:place] = [
        replace(sent, channel=2, tag=1, at=sent.at - 0.0002),
        Nacked(0, 2, 1, multiple=False, at=sent.at - 0.0001),
    ]
    evidence.rows[0] = replace(evidence.rows[0], attempts=1)


def ignore_a_return(evidence: Evidence) -> None:
    place = next(place for place, r in enumerate(evidence.history) if isinstance(r, Acked))
    evidence.history.insert(place, Returned(0, 1, 0, "312 NO_ROUTE", at=evidence.history[place].at - 0.0001))


def send_without_the_lock(evidence: Evidence) -> None:
    """From 15 seconds on another relay has lane 1; this one goes on to read and send it."""
    for place, record in enumerate(evidence.history):
        if isinstance(record, Owned) and record.at > 15:
            evidence.history[place] = replace(record, lanes={**record.lanes, 1: "two"})


def send_what_nobody_holds(evidence: Evidence) -> None:
    evidence.history[:] = [replace(r, lanes={}) if isinstance(r, Owned) else r for r in evidence.history]


def send_again_from_another_relay(evidence: Evidence) -> None:
    """A lane is handed over before its rows are marked."""
    place = next(place for place, r in enumerate(evidence.history) if isinstance(r, Acked))
    sent = evidence.history[place - 1]
    assert isinstance(sent, Published)
    again = replace(sent, connection=9, relay="two", tag=1, at=evidence.history[place].at + 0.0001)
    evidence.history.insert(place + 1, again)


def stay_slow(evidence: Evidence) -> None:
    """From 19 seconds on, every second confirm comes a minute late."""
    for place, record in enumerate(evidence.history):
        if isinstance(record, Acked):
            late = 60 if record.at > 19 and record.tag % 2 else 0
            evidence.history[place] = replace(record, multiple=False, at=record.at + late)


def stay_unready(evidence: Evidence) -> None:
    evidence.history.append(Probed(False, at=21.0))


def stay_ready_under_a_stall(evidence: Evidence) -> None:
    evidence.history[:] = [replace(r, ready=True) if isinstance(r, Probed) else r for r in evidence.history]
    evidence.history[:] = [replace(r, at=20.0) if isinstance(r, Healed) else r for r in evidence.history]


def grow(evidence: Evidence) -> None:
    evidence.history.append(Measured(2**30, 0.0, at=22.0))


def keep_a_transaction(evidence: Evidence) -> None:
    evidence.history.append(Measured(2**20, 31.0, at=22.0))
