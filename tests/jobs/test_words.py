"""How a job stands, in words."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from relay.console.formats import job_mood
from relay.jobs.job import Job, JobState, Kind, Source
from relay.jobs.words import how_far, outcome_of, share_of, speed_words, state_of

NOW = datetime(2026, 11, 29, tzinfo=UTC)
LOOK = "`relay failures list --queue billing.dead` tells what failed again"
RETRY = Job(
    id=7, kind=Kind.RETRY, source=Source.PARKED, state=JobState.RUNNING, made_at=NOW, made_by="ada", made_as="ada",
    why=None, filter={}, to_exchange=None, routing_key=None, rate=None, stages=None, stage=0, stop_when_failing=None,
    selected=12_000, done=3_000, failed=0, released=0, position=1, saved_at=NOW, paused_because=None, by_console=True,
    cancelled_by=None, cancelled_why=None, resumed_by=None, watched=3_000, waiting=None, scanned=None, to_scan=None,
    run_seconds=10.0, began_with=1_000,
)  # fmt: skip
DONE = replace(RETRY, state=JobState.DONE, done=12_000, watched=12_000, waiting=0, run_seconds=None)
LETTERS = replace(
    RETRY, source=Source.DEAD_LETTER, filter={"queue": "billing.dead"}, selected=None, done=30, watched=None,
    scanned=500, to_scan=2_000, began_with=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (RETRY, None),  # it is told at its end
        (replace(DONE, failed=12_000), "of 12,000: 12,000 parked again"),
        (replace(DONE, failed=10), "of 12,000: 10 parked again, 11,990 sent"),
        (DONE, "of 12,000: all sent"),
        (replace(DONE, waiting=400, failed=3), "of 12,000: 3 parked again, 400 not sent yet, 11,597 sent"),
        (replace(DONE, watched=50, failed=50), "of the first 50 of 12,000: at least 50 parked again"),
        (
            replace(DONE, watched=None, waiting=None),
            "not watched: `relay failures list` tells what is parked again",
        ),
        (replace(RETRY, state=JobState.CANCELLED, failed=2), "of 3,000: 2 parked again until now"),
        (replace(DONE, kind=Kind.DISCARD), None),
        (replace(DONE, kind=Kind.REPLAY, source=Source.SENT, failed=2), "12,000 confirmed by the broker, 2 refused"),
        (LETTERS, f"not watched: {LOOK}"),
        (
            replace(LETTERS, stages=[1, 10], stage=2, failed=3),
            f"of 10 in stages: 3 failed again; the others are not watched: {LOOK}",
        ),
        (replace(LETTERS, stages=[1, 100], stage=2, failed=3), "of 30 in stages: 3 failed again"),
        (replace(LETTERS, kind=Kind.DISCARD), None),
    ],
)
def test_the_outcome_says_what_is_known_and_how_much_of_it(job: Job, words: str | None) -> None:
    assert outcome_of(job) == words


@pytest.mark.parametrize(
    ("job", "far", "share", "speed"),
    [
        (RETRY, "3,000 of 12,000", (3_000, 12_000), "200 a second, 45 s left"),
        (replace(RETRY, run_seconds=0.5), "3,000 of 12,000", (3_000, 12_000), None),
        (replace(RETRY, done=1_003), "1,003 of 12,000", (1_003, 12_000), "0.3 a second, 10 h left"),
        (replace(RETRY, waiting=5), "3,000 of 12,000", (3_000, 12_000), None),
        (DONE, "12,000 of 12,000", (12_000, 12_000), None),
        (LETTERS, "30, in 500 of the queue's 2,000 letters", (500, 2_000), "3.0 a second, 30 s left"),
        (replace(LETTERS, to_scan=None), "30", None, "3.0 a second"),
    ],
)
def test_how_far_and_how_fast(job: Job, far: str, share: tuple[int, int] | None, speed: str | None) -> None:
    assert (how_far(job), share_of(job), speed_words(job)) == (far, share, speed)


def test_the_state_says_what_a_console_and_the_watch_do() -> None:
    interrupted = replace(RETRY, state=JobState.INTERRUPTED)

    assert state_of(RETRY) == "running"
    assert state_of(replace(RETRY, waiting=3)) == "watches the outcome"
    assert state_of(interrupted) == "waits for its turn"
    assert state_of(replace(interrupted, by_console=False)) == "interrupted"


def test_a_job_is_green_only_where_its_outcome_is_known() -> None:
    letters = replace(LETTERS, state=JobState.DONE, selected=30)
    jobs = [DONE, replace(DONE, failed=1), replace(DONE, waiting=1), letters, replace(letters, stages=[40], stage=1)]

    assert [job_mood(job) for job in jobs] == ["ok", "warning", "warning", "skipped", "ok"]
    assert job_mood(replace(letters, kind=Kind.DISCARD)) == "ok"


def test_numbers_that_a_hostile_row_has_break_nothing() -> None:
    job = replace(RETRY, began_with=-(2**62), run_seconds=float("inf"), waiting=None)

    assert speed_words(job) is None
    assert speed_words(replace(job, run_seconds=1.0, selected=2**62, done=-(2**62) + 1)) is not None
