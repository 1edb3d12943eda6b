"""JSON text comes back byte for byte, and what is refused is what PostgreSQL refuses."""

import json
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from relay.outbox import Event, PayloadError, add, add_many

TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)
# Text as people and libraries write it, and text that is close to JSON.
JSON_TEXTS = st.builds(
    json.dumps, VALUES, ensure_ascii=st.booleans(), indent=st.none() | st.integers(0, 3), allow_nan=st.just(False)
)
NEARLY_JSON = st.text('{}[]":,0123456789.eE+-\\untrfals /\t\n\x01ä', max_size=12)


@pytest.fixture(scope="module")
def connection(module_url: str) -> Any:
    with psycopg.connect(module_url) as connection:
        yield connection
        connection.rollback()


def stored(connection: psycopg.Connection) -> list[str]:
    rows = connection.execute("SELECT payload::text FROM outbox.message WHERE event_type <> 'Filler' ORDER BY id")
    texts = [text for (text,) in rows]
    connection.rollback()
    return texts


@profile(deadline=None)
@given(texts=st.lists(JSON_TEXTS, min_size=1, max_size=5))
@example(texts=['"\\ud800"', "1e400", "9" * 5000, " [ ] \r\n", '{"a":1,"a":2}', "-0"])
def test_json_text_is_stored_byte_for_byte(connection: psycopg.Connection, texts: list[str]) -> None:
    add(connection, *[Event("A", "7", "E", text) for text in texts])

    assert stored(connection) == texts


@profile(deadline=None)
@given(texts=st.lists(JSON_TEXTS, min_size=1, max_size=5))
@example(texts=['"\\\\N"', '"\\t\\\\."', '"\\u0000"'])
def test_json_text_is_copied_byte_for_byte(connection: psycopg.Connection, texts: list[str]) -> None:
    filler = [Event("Filler", None, "Filler", "0")] * 50

    add_many(connection, [*filler, *[Event("A", "7", "E", text.encode()) for text in texts]])

    assert stored(connection) == texts


@profile(deadline=None)
@given(value=st.dictionaries(TEXTS, VALUES) | st.lists(VALUES))
def test_a_value_is_stored_as_it_was_or_refused(connection: psycopg.Connection, value: Any) -> None:
    try:
        add(connection, Event("A", "7", "E", value))
    except PayloadError as error:
        assert "64-bit" in str(error)  # noqa: PT017
        return

    (text,) = stored(connection)
    assert orjson.loads(text) == value


@profile(deadline=None, max_examples=300)
@given(text=NEARLY_JSON | st.text())
def test_what_is_refused_is_what_postgresql_refuses(connection: psycopg.Connection, text: str) -> None:
    valid = False
    if "\0" not in text:  # which PostgreSQL's protocol cannot even carry
        row = connection.execute("SELECT pg_input_is_valid(%s, 'json')", [text]).fetchone()
        valid = row == (True,)

    try:
        add(connection, Event("A", "7", "E", text))
    except PayloadError:
        taken = False
    else:
        taken = True
    connection.rollback()

    assert taken == valid
