"""The record of a run without violations, as the recorder would have written it."""

from uuid import uuid4

from tests.faults.evidence import Delivered, Evidence, Row
from tests.faults.history import (
    Acked,
    Ending,
    Healed,
    History,
    Injected,
    Measured,
    Owned,
    Probed,
    Published,
    Reach,
    Written,
    digest,
)

RELAY = "one"
KEYS = ("type/a", "type/b", "type/c")


def faithful(length: int = 600) -> Evidence:
    """Three keys, 20 messages a second; every fifth is rolled back, so that its number is used again; one stall.

    Relay `one` holds all lanes, which is looked at ten times a second.
    """
    history: History = [Probed(True, at=0.0), Measured(2**20, 0.1, at=0.0)]
    history += [Owned(dict.fromkeys(range(16), RELAY), at=look / 10) for look in range(10 * 40)]
    evidence = Evidence(history, business=frozenset(), looked_at=1000.0)
    numbers = dict.fromkeys(KEYS, 0)
    for place in range(length):
        key, committed = KEYS[place % 3], place % 5 != 4
        ending, at = Ending.COMMITTED if committed else Ending.ROLLED_BACK, 1 + place / 20
        written = Written(uuid4(), key, numbers[key] + 1, ending, digest(b"%d" % place), at=at)
        history.append(written)
        if committed:
            numbers[key] += 1
            carry(evidence, written, place)
    history += [Injected("mute", Reach.ALL, at=8.0), Probed(False, at=9.0), Healed("mute", at=9.5)]
    history += [Probed(True, at=20.0)]
    history.sort(key=lambda record: record.at)
    return evidence


def carry(evidence: Evidence, written: Written, id_: int) -> None:
    """Publish, confirm, mark and deliver the message."""
    at = written.at
    evidence.history.append(
        Published(0, 1, id_ + 1, id_, written.message_id, written.body, False, id_ % 3, RELAY, at=at + 0.001)
    )
    evidence.history.append(Acked(0, 1, id_ + 1, multiple=True, at=at + 0.002))
    evidence.rows.append(Row(id_, written.message_id, written.key, "sent", 0, False, False, at + 0.003, written.body))
    evidence.deliveries.append(Delivered("all", id_, written.message_id, written.key, written.body))
    evidence.business = (evidence.business or frozenset()) | {written.message_id}
