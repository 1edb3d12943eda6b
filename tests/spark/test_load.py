"""Chunks are ingested while the next ones are made: in their order, one at a time, and no error is lost."""

from collections.abc import Iterator
from threading import Event

import pytest

from outbox_spark.load import load_each


def test_the_next_is_made_while_one_is_ingested_and_no_two_are_ingested_at_once() -> None:
    second_is_made, events = Event(), []

    def made() -> Iterator[int]:
        yield 1
        second_is_made.set()
        yield 2
        yield 3

    def ingest(number: int) -> None:
        events.append(("begun", number))
        assert second_is_made.wait(10)
        events.append(("ended", number))

    load_each(made(), ingest)

    assert events == [(state, number) for number in (1, 2, 3) for state in ("begun", "ended")]


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_an_ingest_that_fails_ends_the_load(faulty: int) -> None:
    ingested: list[int] = []

    def ingest(number: int) -> None:
        if number == faulty:
            raise ValueError(f"number {number}")
        ingested.append(number)

    with pytest.raises(ValueError, match=f"number {faulty}"):
        load_each(iter([1, 2, 3]), ingest)

    assert ingested == list(range(1, faulty))


def test_rows_that_cannot_be_made_end_the_load_once_the_ones_before_are_ingested() -> None:
    ingested: list[int] = []

    def made() -> Iterator[int]:
        yield 1
        raise ValueError("number 2")

    with pytest.raises(ValueError, match="number 2"):
        load_each(made(), ingested.append)

    assert ingested == [1]
