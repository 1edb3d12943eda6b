"""Between relay and broker: what is marked sent was confirmed, and only refusals burn attempts."""

from collections.abc import Iterator

from tests.faults.evidence import Evidence, NoDataError
from tests.faults.fates import Fate, Publication, by_message, fates


def unconfirmed(evidence: Evidence) -> Iterator[str]:
    """Find rows that were marked sent without an earlier ack of a publish that was not returned."""
    publications = _publications(evidence)
    for row in evidence.rows:
        if row.state != "sent" or row.sent_at is None:
            continue
        of_row = publications.get(row.id, [])
        acked_at = [one.ended_at for one in of_row if one.fate is Fate.ACKED]
        if not acked_at:
            ends = ", ".join(one.fate for one in of_row) or "never published"
            yield f"row {row.id} is marked sent, but was {ends}"
        elif min(acked_at) > row.sent_at:
            yield f"row {row.id} was marked sent {min(acked_at) - row.sent_at:.3f} s before its confirm"


def burnt(evidence: Evidence) -> Iterator[str]:
    """Find rows with more attempts than refusals of the broker.

    A row that was never published was refused before it was sent, and is not judged.
    """
    publications = _publications(evidence)
    for row in evidence.rows:
        of_row = publications.get(row.id, [])
        refusals = sum(one.fate in (Fate.RETURNED, Fate.REFUSED) for one in of_row)
        if of_row and row.attempts > refusals:
            ends = ", ".join(one.fate for one in of_row)
            yield f"row {row.id} has {row.attempts} attempts, but was {ends}"


def _publications(evidence: Evidence) -> dict[int, list[Publication]]:
    publications = by_message(fates(evidence.history))
    if not publications:
        raise NoDataError("no recorder stood beside the broker")
    return publications
