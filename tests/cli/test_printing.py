"""What strangers wrote moves no terminal, whichever way it is printed, and JSON still says it."""

import io
import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cli.doctor import draw_checklist
from relay.cli.printing import aside, complain, print_json, print_lines, print_pairs, print_table, say, write_traceback
from relay.observe.printable import printable, printable_json, printable_lines
from relay.operate.doctor.finding import Finding, Verdict
from tests.support.terminal import UNPRINTABLE, Terminal

WAYS: dict[str, Callable[[str], None]] = {
    "say": say,
    "aside": aside,
    "complain": complain,
    "lines": lambda text: print_lines([[text]]),
    "table": lambda text: print_table(["name"], [[text]]),
    "pairs": lambda text: print_pairs([("name", text)]),
    "json": lambda text: print_json({"name": text.replace("\ud800", ""), "key": [text.replace("\ud800", "")]}),
    "checklist": lambda text: draw_checklist([Finding("relay.check", Verdict.FAILED, text, text)]),
    "traceback": lambda text: write_traceback(RuntimeError, RuntimeError(text), None),
}


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_a_terminal_acts_on_is_printed(
    way: str, kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = kind(), kind()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    WAYS[way](f"one {UNPRINTABLE} two")

    told = out.getvalue() + err.getvalue()
    assert "2J" in told
    assert [char for char in told if not char.isprintable() and char not in "\n\t"] == []


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_json_says_the_same(value: object) -> None:
    document = printable_json(json.dumps(value, ensure_ascii=False))

    assert json.loads(document) == value
    assert document.isprintable()


@given(st.text())
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_lines(text).count("\n") == text.count("\n")
