"""The checker judges records of several relays, and of faults that overlap."""

from dataclasses import replace

import pytest

from tests.faults.checker import Invariant, Verdict, invalid, judge
from tests.faults.evidence import Evidence
from tests.faults.faithful import faithful
from tests.faults.history import Acked, Closed, Healed, Injected, Probed, Published, Reach
from tests.faults.violations import stay_slow


def test_a_fault_of_one_relay_excuses_no_other() -> None:
    evidence = faithful()
    stop_answering("two", evidence, relay="two")
    of_itself = judge(evidence)
    stop_answering("one", evidence, relay="two")

    assert not invalid(of_itself)
    assert invalid(judge(evidence)) == {Invariant.TRUTHFUL_READINESS}


@pytest.mark.parametrize("befell", [True, False])
def test_another_relay_sends_again_only_what_a_fault_has_left_to_it(befell: bool) -> None:
    evidence = faithful()
    if befell:
        evidence.history.insert(0, Injected("killed", forgets=True, relay="one", at=5.0))
        evidence.history.insert(1, Healed("killed", at=6.0))
    taken_over(evidence, since=5.5)

    assert (Invariant.REPEATS_ARE_THE_SAME in invalid(judge(evidence))) is not befell


def test_what_was_in_a_socket_when_the_lane_was_taken_over_is_too_late_to_reorder() -> None:
    evidence = faithful()
    place, sent = published_after(evidence, 5.5)
    # Sent and confirmed by another; the first relay's frame passes much later, and its connection ends then.
    evidence.history[place] = replace(sent, relay="two")
    evidence.history += [
        Injected("frozen", forgets=True, relay="one", at=5.0),
        replace(sent, connection=9, tag=1, at=15.5),
        Closed(9, None, at=15.9),
        Healed("frozen", at=16.0),
    ]
    evidence.history.sort(key=lambda record: record.at)

    assert Invariant.IN_ORDER not in invalid(judge(evidence))


def test_faults_that_overlap_are_one_storm_and_the_rate_is_back_after_its_end() -> None:
    evidence = faithful()
    evidence.history += [Injected("cut", Reach.ALL, at=7.5), Healed("cut", at=9.0)]
    healthy = judge(evidence)
    stay_slow(evidence)

    finding = judge(evidence)[Invariant.PROGRESS]

    assert not invalid(healthy)
    assert finding.verdict is Verdict.INVALID
    assert [words.partition(":")[0] for words in finding.words] == ["cut, mute"]


def stop_answering(what: str, evidence: Evidence, *, relay: str) -> None:
    """The relay is not ready for a second, under a fault of the relay `what`."""
    evidence.history += [
        Probed(True, relay, at=21.0),
        Injected(f"freeze {what}", Reach.ALL, relay=what, at=22.0),
        Probed(False, relay, at=22.5),
        Healed(f"freeze {what}", at=23.0),
    ]
    if what != relay:
        evidence.history += [Probed(False, relay, at=29.5)]


def taken_over(evidence: Evidence, *, since: float) -> None:
    """Another relay sends again what was confirmed to the first, and had not been marked."""
    place, sent = published_after(evidence, since)
    evidence.history[place + 2 : place + 2] = [
        replace(sent, connection=9, relay="two", tag=1, at=sent.at + 0.01),
        Acked(9, sent.channel, 1, multiple=False, at=sent.at + 0.011),
    ]


def published_after(evidence: Evidence, since: float) -> tuple[int, Published]:
    return next(
        (place, record)
        for place, record in enumerate(evidence.history)
        if isinstance(record, Published) and record.at > since
    )
