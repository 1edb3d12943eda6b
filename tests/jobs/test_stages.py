"""What `--stages` and `--stop-when-failing` say, and when a stage has failed."""

import pytest

from relay.errors import UsageError
from relay.jobs.stages import Pacing, parse_share, parse_stages


def test_stages_end_after_so_many_rows_in_all() -> None:
    pacing = Pacing(stages=parse_stages("1, 10,100,all"))

    assert [pacing.end_of(stage) for stage in range(4)] == [1, 11, 111, None]


def test_without_stages_there_is_one_without_an_end() -> None:
    assert Pacing().end_of(0) is None


@pytest.mark.parametrize("text", ["", "1,10", "all,1", "0,all", "-1,all", "1,x,all", "100001,all", "1," * 21 + "all"])
def test_stages_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--stages"):
        parse_stages(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0%", 0), ("12.5 %", 0.125), ("100%", 1)])
def test_a_share_is_a_percentage(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "5", "101%", "-1%", "x%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--stop-when-failing"):
        parse_share(text)


@pytest.mark.parametrize(
    ("share", "failed", "rows", "is_failing"),
    [(None, 0, 10, False), (None, 1, 10, True), (0.0, 0, 10, False), (0.5, 4, 10, False), (0.5, 5, 10, True)],
)
def test_a_stage_fails_from_the_share_on(share: float | None, failed: int, rows: int, is_failing: bool) -> None:
    assert Pacing(stages=(rows,), stop_when_failing=share).is_failing(failed, rows) is is_failing
