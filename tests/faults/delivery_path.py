"""Invariants over time: the rate recovers, innocent keys go on, readiness is truthful, memory stays bounded."""

from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from statistics import quantiles

from tests.faults.evidence import Evidence, NoDataError
from tests.faults.fates import Fate, Publication, fates
from tests.faults.history import Ending, Measured, Probed, Reach, Written
from tests.faults.injections import Fault, faults, storms

RECOVERY = 10.0  # seconds after the heal in which the rate may still be low
SPAN = 5.0  # seconds over which a rate is taken
SHARE = 0.9  # of the rate before
ENOUGH = 100  # messages that a 99th percentile takes
SLOWER = 2.0  # times the latency before
UNNOTICED = 0.05  # seconds; below it nobody calls a latency slow
NOTICED_WITHIN, READY_WITHIN = 10.0, 5.0  # seconds
MAX_RESIDENT = 300 * 1024 * 1024  # bytes
MAX_TRANSACTION = 30.0  # seconds


def slower(evidence: Evidence) -> Iterator[str]:
    """Find heals after which the confirmed share of what is written has not recovered within ten seconds.

    Faults that follow each other closely count as one.
    """
    acked = sorted(one.ended_at for one in fates(evidence.history) if one.fate is Fate.ACKED)
    written = sorted(
        record.at
        for record in evidence.history
        if isinstance(record, Written) and record.ending is not Ending.ROLLED_BACK
    )
    healed = storms((fault for fault in faults(evidence.history) if fault.is_healed), RECOVERY + 2 * SPAN)
    if not acked or not written or not healed:
        raise NoDataError("no rate before and after a fault was recorded")
    for fault in healed:
        before, after = fault.begun - SPAN, fault.healed + RECOVERY
        enough = written[0] <= before and after + SPAN <= written[-1]
        if not enough or not all(_within(written, since) for since in (before, after)):
            raise NoDataError(f"{fault.what}: nobody wrote for long enough before it and after the heal")
        shares = [_within(acked, since) / _within(written, since) for since in (before, after)]
        if shares[1] < SHARE * shares[0]:
            was, is_now = shares
            yield f"{fault.what}: {is_now:.2f} of what is written is confirmed after the heal, {was:.2f} before"


def delayed(evidence: Evidence) -> Iterator[str]:
    """Find keys without a refusal that are slower under the fault than before it."""
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
    hit_all = [fault for fault in faults(evidence.history) if fault.reach is not Reach.SOME]
    alone = [
        fault
        for fault in faults(evidence.history)
        if fault.reach is Reach.SOME
        and not any(one.begun < fault.healed and fault.begun < one.ended + RECOVERY for one in hit_all)
    ]
    if not alone:
        raise NoDataError("no fault that hits some keys only stood alone")
    for fault in alone:
        before = [latency for at, latency in latencies if at < fault.begun]
        under = [latency for at, latency in latencies if fault.begun <= at < fault.healed]
        if min(len(before), len(under)) < ENOUGH:
            raise NoDataError(f"{fault.what}: fewer than {ENOUGH} innocent messages before it or under it")
        usual, now = (quantiles(sample, n=100)[-1] for sample in (before, under))
        if now > max(SLOWER * usual, UNNOTICED):
            yield f"{fault.what}: the 99th percentile of innocent keys went from {usual:.3f} s to {now:.3f} s"


def untruthful(evidence: Evidence) -> Iterator[str]:
    """Find wrong readiness: it must fail within 10 s of a stall, recover 5 s after the heal, and hold otherwise."""
    probes = [record for record in evidence.history if isinstance(record, Probed)]
    if not any(probe.ready for probe in probes):
        raise NoDataError("nobody asked whether it is ready, or it never was")
    for relay in {probe.relay for probe in probes}:
        of_relay = [probe for probe in probes if probe.relay == relay]
        stalls = [fault for fault in faults(evidence.history) if fault.reach is Reach.ALL and fault.hits(relay)]
        yield from _untruthful(of_relay, stalls)


def _untruthful(probes: list[Probed], stalls: list[Fault]) -> Iterator[str]:
    started_at = next((probe.at for probe in probes if probe.ready), inf)
    for fault in stalls:
        noticed_by = fault.begun + NOTICED_WITHIN
        if fault.healed > noticed_by and all(p.ready for p in probes if fault.begun <= p.at <= noticed_by):
            yield f"{fault.what}: ready, though nothing was delivered for {NOTICED_WITHIN:g} s"
    for probe in probes:
        excused = any(fault.begun <= probe.at <= fault.healed + READY_WITHIN for fault in stalls)
        if probe.at > started_at and not probe.ready and not excused:
            yield f"{probe.relay} not ready at {probe.at:.3f}, while nothing kept it from delivering".lstrip()


def unbounded(evidence: Evidence) -> Iterator[str]:
    """Find moments at which the relay's memory is too large, or its transaction too old."""
    measured = [record for record in evidence.history if isinstance(record, Measured)]
    if not measured:
        raise NoDataError("nobody measured the relay's memory and transactions")
    largest = max(record.resident_bytes for record in measured)
    oldest = max(record.oldest_transaction for record in measured)
    if largest > MAX_RESIDENT:
        yield f"{largest >> 20} MiB of memory"
    if oldest > MAX_TRANSACTION:
        yield f"a transaction of {oldest:.0f} s"


def _within(times: list[float], since: float) -> int:
    return bisect_left(times, since + SPAN) - bisect_left(times, since)


def _guilty_keys(publications: list[Publication], written: list[Written]) -> set[str | None]:
    refused = {one.sent.message_id for one in publications if one.fate is not Fate.ACKED}
    return {record.key for record in written if record.message_id in refused}
