"""The checker sees each violation that is planted into the record of a faithful run, and nothing in that run."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from uuid import uuid4

import pytest

from tests.faults import violations
from tests.faults.checker import Finding, Invariant, Verdict, assert_valid, differences, invalid, judge, report
from tests.faults.evidence import Evidence
from tests.faults.faithful import carry, faithful
from tests.faults.history import Acked, Closed, Ending, Healed, Injected, Published, Reach, Written, digest

JUDGED = set(Invariant) - {Invariant.INNOCENT_KEYS}  # which has its own runs
Plant = Callable[[Evidence], object]


def test_a_faithful_run_is_valid() -> None:
    assert_valid(judge(faithful()), *JUDGED)


def test_other_keys_may_overtake() -> None:
    evidence = faithful()
    evidence.deliveries.sort(key=lambda one: one.key or "")  # stable: in order within each key

    assert_valid(judge(evidence), *JUDGED)


def test_repeats_are_no_violation_wherever_they_come() -> None:
    evidence = faithful()
    first = evidence.deliveries
    evidence.deliveries = [*first[:10], *first[3:10], *first[10:], *first[:2]]

    assert_valid(judge(evidence), *JUDGED)


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        (violations.drop_one, Invariant.NOTHING_LOST),
        (violations.drop_the_last, Invariant.NOTHING_LOST),
        (violations.drop_the_row_as_well, Invariant.NOTHING_LOST),
        (violations.deliver_unknown, Invariant.NOTHING_INVENTED),
        (violations.deliver_rolled_back, Invariant.NOTHING_INVENTED),
        (violations.lose_a_business_row, Invariant.NOTHING_INVENTED),
        (violations.mark_before_the_confirm, Invariant.SENT_IS_CONFIRMED),
        (violations.mark_without_a_confirm, Invariant.SENT_IS_CONFIRMED),
        (violations.ignore_a_return, Invariant.SENT_IS_CONFIRMED),
        (violations.swap_within_a_key, Invariant.IN_ORDER),
        (violations.deliver_late_but_repeat_early, Invariant.IN_ORDER),
        (violations.deliver_behind_a_parked_one, Invariant.IN_ORDER),
        (violations.send_before_the_predecessor_is_confirmed, Invariant.IN_ORDER),
        (violations.change_a_key, Invariant.REPEATS_ARE_THE_SAME),
        (violations.change_a_repeat, Invariant.REPEATS_ARE_THE_SAME),
        (violations.send_again_after_the_confirm, Invariant.REPEATS_ARE_THE_SAME),
        (violations.send_again_without_saying_so, Invariant.REPEATS_ARE_THE_SAME),
        (violations.send_again_from_another_relay, Invariant.REPEATS_ARE_THE_SAME),
        (violations.burn_an_attempt_by_a_nack, Invariant.NO_ATTEMPT_BURNT),
        (violations.send_without_the_lock, Invariant.ONE_OWNER),
        (violations.send_what_nobody_holds, Invariant.ONE_OWNER),
        (violations.stay_slow, Invariant.PROGRESS),
        (violations.stay_unready, Invariant.TRUTHFUL_READINESS),
        (violations.stay_ready_under_a_stall, Invariant.TRUTHFUL_READINESS),
        (violations.grow, Invariant.BOUNDED),
        (violations.keep_a_transaction, Invariant.BOUNDED),
    ],
)
def test_a_planted_violation_is_found(plant: Plant, invariant: Invariant) -> None:
    evidence = faithful()

    plant(evidence)

    assert invariant in invalid(judge(evidence))


@pytest.mark.parametrize("close", [Closed(99, 2, 404), Closed(99, None, 320)], ids=["channel", "connection"])
def test_a_row_that_passes_behind_a_close_may_be_sent_again(close: Closed) -> None:
    evidence = faithful()
    place, sent = next((place, r) for place, r in enumerate(evidence.history) if isinstance(r, Published))
    evidence.history[place:place] = [
        replace(close, at=sent.at - 0.0003),
        replace(sent, connection=99, channel=2, tag=7, at=sent.at - 0.0002),
    ]
    evidence.history[place + 2] = replace(sent, redelivered=True)

    assert not invalid(judge(evidence))


def test_rows_that_are_pending_leave_nothing_valid() -> None:
    evidence = faithful()
    evidence.rows[-1] = replace(evidence.rows[-1], state="pending", sent_at=None)
    del evidence.deliveries[-1]

    assert {finding.verdict for finding in judge(evidence).values()} == {Verdict.UNKNOWN}


def test_a_row_that_was_overtaken_and_that_nobody_moves_is_lost_after_a_while() -> None:
    evidence = faithful()
    evidence.rows[3] = replace(evidence.rows[3], state="pending", sent_at=None)
    del evidence.deliveries[3]
    evidence.patient = True

    assert judge(evidence)[Invariant.NOTHING_LOST].verdict is Verdict.INVALID


def test_a_run_without_data_is_not_valid() -> None:
    findings = judge(Evidence([]))

    assert {finding.verdict for finding in findings.values()} == {Verdict.UNKNOWN}
    with pytest.raises(AssertionError, match="no writer told"):
        assert_valid(findings, Invariant.NOTHING_LOST)


@pytest.mark.parametrize("there", [True, False])
def test_an_unknown_commit_goes_either_way_but_with_its_business_row(there: bool) -> None:
    evidence = faithful(10)
    written = Written(uuid4(), "type/a", 9, Ending.UNKNOWN, digest(b"?"), at=500.0)
    evidence.history.append(written)
    if there:
        carry(evidence, written, 99)
    together = judge(evidence)
    evidence.business = (evidence.business or frozenset()) ^ {written.message_id}

    assert not invalid(together)
    assert Invariant.NOTHING_INVENTED in invalid(judge(evidence))


def test_every_message_out_of_order_is_reported() -> None:
    evidence = Evidence([], by_key=False)
    for number in range(1, 6):
        written = Written(uuid4(), "type/a", number, Ending.COMMITTED, digest(b""), at=float(number))
        evidence.history.append(written)
        carry(evidence, written, number)
    evidence.deliveries.reverse()

    assert len(judge(evidence)[Invariant.IN_ORDER].words) == 4


@pytest.mark.parametrize(("latency", "verdict"), [(0.002, Verdict.VALID), (0.2, Verdict.INVALID)])
def test_innocent_keys_are_as_quick_under_the_fault(latency: float, verdict: Verdict) -> None:
    evidence = Evidence([Injected("full", Reach.SOME, at=100.0), Healed("full", at=300.0)])
    for place in range(400):
        written = Written(uuid4(), f"type/{place}", 1, Ending.COMMITTED, digest(b""), at=place / 2)
        evidence.history.append(written)
        carry(evidence, written, place)
    evidence.history[:] = [
        replace(r, at=r.at + latency) if isinstance(r, Acked) and r.at > 100 else r for r in evidence.history
    ]
    evidence.rows = [replace(row, sent_at=(row.sent_at or 0) + 1) for row in evidence.rows]

    assert judge(evidence)[Invariant.INNOCENT_KEYS].verdict is verdict


def test_equal_tables_in_any_order_have_no_difference() -> None:
    rows = [(number, "x") for number in range(10)]

    assert differences(rows, Random(7).sample(rows, 10)) == []


@pytest.mark.parametrize(
    ("projected", "words"),
    [
        ([(1, "x")], ["(2, 'y') is written, not projected"]),
        ([(1, "x"), (2, "y"), (3, "z")], ["(3, 'z') is projected, not written"]),
        ([(1, "x"), (2, "y"), (2, "y")], ["(2, 'y') is projected, not written"]),
        ([(1, "x"), (2, "n")], ["(2, 'y') is written, not projected", "(2, 'n') is projected, not written"]),
    ],
)
def test_rows_that_differ_are_told(projected: list[tuple[object, ...]], words: list[str]) -> None:
    assert differences([(1, "x"), (2, "y")], projected) == words


def test_a_report_counts_all_and_shows_some() -> None:
    findings = {Invariant.NOTHING_LOST: Finding(Verdict.INVALID, [f"number {number}" for number in range(30)])}

    lines = report(findings, findings, at_most=2).splitlines()

    assert lines == ["I1 nothing lost: invalid, 30", "    number 0", "    number 1"]
