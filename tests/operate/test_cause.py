"""The cause of a failure: the same in Python and in the database, and free of what differs from row to row."""

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.operate.cause import NO_REASON, cause_of, group_of

CASES = [
    ("312 NO_ROUTE", "312 NO_ROUTE"),
    ("returned: 312 NO_ROUTE", "returned: 312 NO_ROUTE"),
    (
        "404 NOT_FOUND - no exchange 'orders.v2' in vhost '/'",
        "404 NOT_FOUND - no exchange '*' in vhost '*'",
    ),
    ("message of 1048577 bytes is larger than 1048576", "message of * bytes is larger than *"),
    ("ValueError: invoice 17 of 2026-11-21T08:00:00Z", "ValueError: invoice * of *"),
    ("no row 0c6f2f1e-6a0f-4f55-9f1d-0e6c4e1f9a1b", "no row *"),
    ('KeyError: "customer 7"', 'KeyError: "*"'),
    ("KeyError: `a`", "KeyError: `*`"),
    ("it doesn't answer, and can't", "it doesn't answer, and can't"),
    ("took 1.5 s, at 10:11:12.5", "took * s, at *"),
    ("a\n  b\t c ", "a b c"),
    ("order_17 failed 0xdeadbeef1", "* failed *"),
    ("waits behind message 4711", "waits behind message *"),
    ("x" * 600, "x" * 500),
    ("", NO_REASON),
    (None, NO_REASON),
]
UUID = "0c6f2f1e-6a0f-4f55-9f1d-0e6c4e1f9a1b"
# What the steps look for, in any order.
WORDS = st.lists(
    st.sampled_from(
        [*"'\"`*-.:/+,_ \n\t0159abAFxZ\u00e9\u4e00", "312 NO_ROUTE", "0c6f2f1e-6a0f-4f55-9f1d-0e6c4e1f9a1b"]
    ),
    max_size=40,
).map("".join)
ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=600)


@pytest.mark.parametrize(("words", "cause"), CASES, ids=[f"{index}" for index in range(len(CASES))])
def test_what_differs_from_row_to_row_is_taken_out(words: str | None, cause: str) -> None:
    assert cause_of(words) == cause


@pytest.mark.every_postgres
def test_the_database_finds_the_same_causes(connection: psycopg.Connection) -> None:
    found = connection.execute(
        "SELECT outbox.failure_cause(words) FROM unnest(%s::text[]) WITH ORDINALITY AS given (words, number)"
        " ORDER BY number",
        [[words for words, _ in CASES]],
    ).fetchall()

    assert [cause for (cause,) in found] == [cause_of(words) for words, _ in CASES]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS | ANY, event_type=WORDS)
def test_any_words_have_the_same_cause_and_group_in_both(
    words: str, event_type: str, connection: psycopg.Connection
) -> None:
    found = connection.execute(
        "SELECT outbox.failure_cause(%(words)s), outbox.failure_group('parked', %(cause)s, %(event_type)s, NULL)",
        {"words": words, "cause": cause_of(words), "event_type": event_type},
    ).fetchone()

    assert found == (cause_of(words), group_of("parked", cause_of(words), event_type, None))
