"""Over time: the rate comes back, innocent keys go on, readiness tells the truth, memory stays bounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import quantiles

from tests.faults.evidence import Evidence, NoDataError
from tests.faults.fates import Fate, Publication, fates
from tests.faults.history import Healed, History, Injected, Measured, Probed, Reach, Written

RECOVERY = 10.0  # seconds after the heal in which the rate may still be low
SPAN = 5.0  # seconds over which a rate is taken
SHARE = 0.9  # of the rate before
ENOUGH = 100  # messages that a 99th percentile takes
SLOWER = 2.0  # times the latency before
UNNOTICED = 0.05  # seconds; below it nobody calls a latency slow
NOTICED_WITHIN, READY_WITHIN = 10.0, 5.0  # seconds
MAX_RESIDENT = 300 * 1024 * 1024  # bytes
MAX_TRANSACTION = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class _Fault:
    """From an injection to its heal, which may not have come."""

    what: str
    begun: float
    healed: float
    reach: Reach


def slower(evidence: Evidence) -> Iterator[str]:
    """Ten seconds after each heal as much is confirmed in a second as before the fault."""
    acked = sorted(one.ended_at for one in fates(evidence.history) if one.fate is Fate.ACKED)
    written = [record.at for record in evidence.history if isinstance(record, Written)]
    healed = [fault for fault in _faults(evidence.history) if fault.healed < inf]
    if not acked or not written or not healed:
        raise NoDataError("no rate before and after a fault was recorded")
    for fault in healed:
        after = fault.healed + RECOVERY
        if fault.begun - SPAN < min(written) or after + SPAN > max(written):
            raise NoDataError(f"{fault.what}: nobody wrote for long enough before it and after the heal")
        before_rate, rate = (sum(t <= at < t + SPAN for at in acked) / SPAN for t in (fault.begun - SPAN, after))
        if rate < SHARE * before_rate:
            yield f"{fault.what}: {rate:.0f} messages/s after the heal, {before_rate:.0f} before"


def delayed(evidence: Evidence) -> Iterator[str]:
    """Keys of which nothing was refused are as quick under the fault as before it."""
    publications = fates(evidence.history)
    confirmed_at: dict[object, float] = {}
    for one in publications:
        if one.fate is Fate.ACKED:
            confirmed_at.setdefault(one.sent.message_id, one.ended_at)
    written = [record for record in evidence.history if isinstance(record, Written)]
    guilty = _guilty_keys(publications, written)
    latencies = [
        (record.at, confirmed_at[record.message_id] - record.at)
        for record in written
        if record.message_id in confirmed_at and record.key not in guilty
    ]
    faults = [fault for fault in _faults(evidence.history) if fault.reach is Reach.SOME]
    if not faults:
        raise NoDataError("no fault was injected that hits some keys only")
    for fault in faults:
        before = [latency for at, latency in latencies if at < fault.begun]
        under = [latency for at, latency in latencies if fault.begun <= at < fault.healed]
        if min(len(before), len(under)) < ENOUGH:
            raise NoDataError(f"{fault.what}: fewer than {ENOUGH} innocent messages before it or under it")
        usual, now = (quantiles(sample, n=100)[-1] for sample in (before, under))
        if now > max(SLOWER * usual, UNNOTICED):
            yield f"{fault.what}: the 99th percentile of innocent keys went from {usual:.3f} s to {now:.3f} s"


def untruthful(evidence: Evidence) -> Iterator[str]:
    """Readiness fails within ten seconds of a stall, is back five after the heal, and never fails otherwise."""
    probes = [record for record in evidence.history if isinstance(record, Probed)]
    started_at = next((probe.at for probe in probes if probe.ready), None)
    if started_at is None:
        raise NoDataError("nobody asked whether it is ready, or it never was")
    stalls = [fault for fault in _faults(evidence.history) if fault.reach is Reach.ALL]
    for fault in stalls:
        noticed_by = fault.begun + NOTICED_WITHIN
        if fault.healed > noticed_by and all(p.ready for p in probes if fault.begun <= p.at <= noticed_by):
            yield f"{fault.what}: ready, though nothing was delivered for {NOTICED_WITHIN:g} s"
    for probe in probes:
        excused = any(fault.begun <= probe.at <= fault.healed + READY_WITHIN for fault in stalls)
        if probe.at > started_at and not probe.ready and not excused:
            yield f"not ready at {probe.at:.3f}, while nothing kept it from delivering"


def unbounded(evidence: Evidence) -> Iterator[str]:
    """The relay stays small, and none of its transactions becomes old."""
    measured = [record for record in evidence.history if isinstance(record, Measured)]
    if not measured:
        raise NoDataError("nobody measured the relay's memory and transactions")
    largest = max(record.resident_bytes for record in measured)
    oldest = max(record.oldest_transaction for record in measured)
    if largest > MAX_RESIDENT:
        yield f"{largest >> 20} MiB of memory"
    if oldest > MAX_TRANSACTION:
        yield f"a transaction of {oldest:.0f} s"


def _faults(history: History) -> list[_Fault]:
    faults: list[_Fault] = []
    for place, record in enumerate(history):
        if isinstance(record, Injected):
            healed = (later.at for later in history[place:] if isinstance(later, Healed) and later.what == record.what)
            faults.append(_Fault(record.what, record.at, next(healed, inf), record.reach))
    return faults


def _guilty_keys(publications: list[Publication], written: list[Written]) -> set[str | None]:
    refused = {one.sent.message_id for one in publications if one.fate is not Fate.ACKED}
    return {record.key for record in written if record.message_id in refused}
