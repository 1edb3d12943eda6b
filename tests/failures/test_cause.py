"""The cause of a failure: what is taken out of its words, and that PostgreSQL and Python take out the same."""

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.operate.failures.cause import MOST_KEPT, FailureKind, cause_of, failure_id

# Text of what the patterns look at, and any other text that PostgreSQL can hold.
PIECES = st.sampled_from([*"'\"#0179afAFTZ-:., _", "404 NOT_FOUND", "0123456789abcdef", "\n", "é", "it's", "00000000-"])
WORDS = st.one_of(
    st.lists(PIECES, max_size=60).map("".join),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (None, ""),
        ("", ""),
        ("returned: no queue is bound", "returned: no queue is bound"),
        ("312 NO_ROUTE", "312 NO_ROUTE"),
        ("returned: 312 NO_ROUTE after 8 tries", "returned: 312 NO_ROUTE after # tries"),
        ("404 NOT_FOUND - no exchange 'billing' in vhost '/'", "404 NOT_FOUND - no exchange ? in vhost ?"),
        ('KeyError: "customer 17"', "KeyError: ?"),
        ("ValueError: couldn't read 'x', can't go on", "ValueError: couldn't read ?, can't go on"),
        ("row 17 has 1,048,577 bytes, 12.5 % too many", "row # has # bytes, # % too many"),
        ("at 2026-11-21T08:00:00.123+00:00 it ended", "at # it ended"),
        ("0c6f2a10-5f0e-4a37-9d3b-2f1f6f0a9b11 is unknown", "# is unknown"),
        ("checksum d41d8cd98f00b204e9800998ecf8427e differs", "checksum # differs"),
        ("two\n  lines ", "two lines"),
        ("10.0.0.7:5672 refused", "# refused"),
        ("x" * 300, "x" * MOST_KEPT),
    ],
)
def test_what_differs_from_row_to_row_is_taken_out(words: str | None, cause: str) -> None:
    assert cause_of(words) == cause


@given(words=WORDS, event_type=WORDS, place=st.none() | WORDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_postgresql_takes_out_the_same(database_url: str, words: str, event_type: str, place: str | None) -> None:
    with psycopg.connect(database_url) as connection:
        told = connection.execute(
            "SELECT outbox.cause(%(words)s), outbox.failure_id('parked', outbox.cause(%(words)s), %(type)s, %(place)s)",
            {"words": words, "type": event_type, "place": place},
        ).fetchone()

    cause = cause_of(words)
    assert told == (cause, failure_id(FailureKind.PARKED, cause, event_type, place))


@given(words=WORDS)
def test_a_cause_keeps_no_number_but_the_code_of_a_reply(words: str) -> None:
    cause = cause_of(words)

    assert len(cause) <= MOST_KEPT
    assert not [digit for digit in "0123456789" if digit in cause] or "NOT_FOUND" in cause
