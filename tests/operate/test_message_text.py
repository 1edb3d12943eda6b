"""What messages say as text that people read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.operate.messages.text import changes, hex_dump, indented, shown, text_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES, st.booleans())
def test_indented_json_says_the_same(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)

    assert json.loads(indented(text)) == value
    assert indented(indented(text)) == indented(text)


def test_a_number_keeps_its_digits_and_a_name_that_comes_twice_stays() -> None:
    text = indented('{"amount":1.10,"amount":1e400,"id":123456789012345678901234567890,"none":{},"lines":[]}')

    assert text.splitlines() == [
        "{", '  "amount": 1.10,', '  "amount": 1e400,', '  "id": 123456789012345678901234567890,', '  "none": {},',
        '  "lines": []', "}",
    ]  # fmt: skip


def test_what_would_not_show_is_shown_by_its_number() -> None:
    assert indented('["pay \u202e001\u200b"]') == '[\n  "pay \\u202e001\\u200b"\n]'


def test_a_thousand_levels_do_not_grow_by_their_square() -> None:
    assert len(indented("[" * 5_000 + "]" * 5_000)) < 500_000


def test_bytes_are_shown_as_hex_unless_they_are_text() -> None:
    assert hex_dump(b"\x00\xffAB <b>0123456789x").splitlines() == [
        "00000000  00 ff 41 42 20 3c 62 3e  30 31 32 33 34 35 36 37  ..AB <b>01234567",
        "00000010  38 39 78                                          89x",
    ]
    assert shown(None, b"\x00\x01", is_whole=True).kind == "bytes"
    assert shown(None, "<a>é</a>\n".encode(), is_whole=True).text == "<a>é</a>\n"


@pytest.mark.parametrize("end", range(1, 9))
def test_text_that_was_cut_within_a_character_is_text(end: int) -> None:
    data = "ab€𝄞".encode()[:end]

    assert (text_of(data, is_whole=False) or "") in "ab€𝄞"
    assert text_of(data, is_whole=False) is not None


def test_the_lines_that_differ_are_told_with_a_few_around_them() -> None:
    old = indented('{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}')

    assert changes(old, old) == []
    assert changes(old, old.replace("6", "7")) == [
        "@@ -5,4 +5,4 @@", '   "d": 4,', '   "e": 5,', '-  "f": 6', '+  "f": 7', " }",
    ]  # fmt: skip
    assert len(changes("", "x\n" * 5_000)) == 401
