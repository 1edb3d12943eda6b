"""Who may send a row of a lane that changes hands, judged from looks at the locks and from what the recorders saw."""

from dataclasses import replace

import pytest

from tests.faults.checker import Findings, Invariant, Verdict, judge
from tests.faults.evidence import Evidence
from tests.faults.faithful import faithful
from tests.faults.history import Owned, Published
from tests.faults.owners import belated

TURN = 15.0  # seconds; from then on lane 1 is another relay's
LANE = 1


@pytest.fixture
def evidence() -> Evidence:
    """Lane 1 is handed over: the other one sends its rows from then on."""
    given = faithful()
    for place, record in enumerate(given.history):
        if isinstance(record, Owned) and record.at >= TURN:
            given.history[place] = replace(record, lanes={**record.lanes, LANE: "two"})
        elif isinstance(record, Published) and record.lane == LANE and record.at >= TURN:
            given.history[place] = replace(record, relay="two")
    return given


def test_a_lane_is_handed_over(evidence: Evidence) -> None:
    assert verdict(judge(evidence)) is Verdict.VALID
    assert not belated(evidence.history, "one")


@pytest.mark.parametrize(("committed_before_the_turn", "expected"), [(0.2, Verdict.VALID), (-2.0, Verdict.INVALID)])
def test_what_was_committed_before_the_turn_may_leave_the_socket_late(
    evidence: Evidence, committed_before_the_turn: float, expected: Verdict
) -> None:
    committed_at = TURN - committed_before_the_turn
    late = next(r for r in evidence.history if isinstance(r, Published) and r.lane == LANE and r.at > committed_at)
    evidence.history.remove(late)

    evidence.history.append(replace(late, relay="one", at=TURN + 4))

    assert verdict(judge(evidence)) is expected
    assert [one.outbox_id for one in belated(evidence.history, "one")] == [late.outbox_id]


def test_a_lane_may_come_back(evidence: Evidence) -> None:
    for place, record in enumerate(evidence.history):
        if isinstance(record, Owned) and record.at >= TURN + 5:
            evidence.history[place] = replace(record, lanes={**record.lanes, LANE: "one"})
        elif isinstance(record, Published) and record.lane == LANE and record.at >= TURN + 5:
            evidence.history[place] = replace(record, relay="one")

    assert verdict(judge(evidence)) is Verdict.VALID


def test_a_session_without_a_name_may_be_anybodys(evidence: Evidence) -> None:
    for place, record in enumerate(evidence.history):
        if isinstance(record, Owned) and TURN <= record.at < TURN + 1:
            evidence.history[place] = replace(record, lanes={**record.lanes, LANE: ""})

    assert verdict(judge(evidence)) is Verdict.VALID


def test_what_nobody_looked_at_is_not_judged(evidence: Evidence) -> None:
    evidence.history[:] = [r for r in evidence.history if not isinstance(r, Owned) or r.at % 1 < 0.1]

    assert verdict(judge(evidence)) is Verdict.UNKNOWN


def verdict(findings: Findings) -> Verdict:
    return findings[Invariant.ONE_OWNER].verdict
