"""The frame of the benchmarks: sides alternate, a ratio is to the reference of its round, a loss fails the run."""

import json
from pathlib import Path

import pytest

from bench.frame import run as frame
from bench.frame.error import BenchmarkError
from bench.frame.run import Bench, Column, Count, Run, Spread, main

RATE, RATIO = Column("rows/s", "rate"), Column("ratio", "rate", 2, is_ratio=True)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def run() -> Run:
    return Run("some", {"rounds": 3})


def test_each_round_starts_with_another_side(run: Run) -> None:
    assert "".join(side for _, side in run.turns(["a", "b", "c"], 3)) == "abcbcacab"


def test_the_warm_up_does_not_count(run: Run) -> None:
    rates = iter([1.0, 5.0, 6.0])
    table = run.table("drained", RATE)

    table.measure({"relay": lambda: {"rate": next(rates)}}, 2, warm_up=1)

    assert table.spreads() == {"relay": [Spread(5.5, 5.0, 6.0)]}


def test_a_ratio_is_to_the_reference_of_the_same_round(run: Run) -> None:
    references, others = iter([10.0, 20.0]), iter([5.0, 40.0])
    table = run.table("drained", RATE, RATIO)

    table.measure({"C": lambda: {"rate": next(references)}, "relay": lambda: {"rate": next(others)}}, 2)

    assert table.spreads()["relay"] == [Spread(22.5, 5.0, 40.0), Spread(1.25, 0.5, 2.0)]


def test_a_ratio_may_be_to_another_side(run: Run) -> None:
    table = run.table("applied", Column("of one", "rate", is_ratio=True, reference="one"))

    table.measure({"bare": lambda: {"rate": 8.0}, "one": lambda: {"rate": 4.0}}, 1)

    assert table.spreads() == {"bare": [Spread(2.0, 2.0, 2.0)], "one": [Spread(1.0, 1.0, 1.0)]}


def test_what_was_not_measured_has_no_spread(run: Run) -> None:
    table = run.table("drained", RATE, Column("memory", "memory"), RATIO)

    table.add("relay", {"rate": 5.0})

    assert table.spreads() == {"relay": [Spread(5.0, 5.0, 5.0), None, None]}


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (3, 1)])
def test_a_lost_message_fails_the_run(run: Run, results: Path, lost: int, code: int) -> None:
    run.table("drained", RATE).add("relay", {"rate": 5.0, "lost": lost})

    assert run.finish() == code
    written = json.loads((results / "some.json").read_text())
    assert written["tables"]["drained"]["rounds"] == [{"side": "relay", "round": 1, "rate": 5.0, "lost": lost}]
    assert (results / "some.png").exists()


def test_a_failure_is_told_after_the_tables(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.table("drained", RATE).add("relay", {"rate": 5.0})
    run.fail("memory grows")

    assert run.finish() == 1
    assert "memory grows" in capsys.readouterr().out.partition("drained")[2]


def test_a_run_that_measures_nothing_is_an_error(run: Run) -> None:
    run.table("drained", RATE)

    with pytest.raises(BenchmarkError, match="leave out every measurement"):
        run.finish()


@pytest.mark.parametrize(
    ("error", "code"), [(BenchmarkError("the servers are busy"), "the servers are busy"), (KeyboardInterrupt(), 130)]
)
def test_a_bench_that_cannot_measure_exits(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: str | int
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "2"])

    def measure(*, rounds: Count = 3, run: Bench) -> None:
        assert (rounds, type(run)) == (2, Run)
        raise error

    with pytest.raises(SystemExit) as exited:
        main(measure)

    assert exited.value.code == code
