"""The check of the prose objects to the turns that it was made for, and to nothing that reads well."""

from pathlib import Path

import pytest

from tests.prose import __main__ as command
from tests.prose.examples import EXAMPLES
from tests.prose.pages import blocks
from tests.prose.rules import LONGEST, findings

# The examples of the rules: what was written, and how it reads better.
TURNS = [
    ("Whoever connects gets a password.", "prose.nameless"),
    ("The relay sends it anew.", "prose.turn"),
    ("The replay runs beside the relay.", "prose.turn"),
    ("The queue is to be declared.", "prose.turn"),
    ("The replay has a connection of its own.", "prose.turn"),
    ("Messages wait and none settles.", "prose.none"),
    ("Of the broker the heartbeats tell.", "prose.fronted"),
    ("It stops. Of a relay the name is shown.", "prose.fronted"),
    ("The row whereof we speak", "prose.archaic"),
    ("It waits, peradventure for long.", "archaism"),
]


@pytest.mark.parametrize(("was", "better"), EXAMPLES)
def test_each_example_is_objected_to_until_it_reads_better(was: str, better: str) -> None:
    assert findings(was) != []
    assert findings(better) == []


@pytest.mark.parametrize(("text", "rule"), TURNS)
def test_a_turn_is_found_by_its_rule(text: str, rule: str) -> None:
    assert [each.check_path for each in findings(text)] == [rule]


def test_a_sentence_has_as_many_words_as_it_may() -> None:
    longest = "word " * (LONGEST - 1) + "end."

    assert findings(f"{longest} {longest}") == []
    assert [each.check_path for each in findings(f"Too {longest}")] == ["prose.long"]


def test_items_and_cells_are_sentences_by_themselves_and_code_is_one_word() -> None:
    page = """\
# Somewhere

- one item
  of two lines
- [another](https://example.org/whoever), `relay run --and more`

| a | b |
|---|---|
| whoever | c |

```
somebody
```
"""
    assert [(each.line, each.text) for each in blocks(page)] == [
        (1, "Somewhere"),
        (3, "one item of two lines"),
        (5, "another, `code`"),
        (7, "a"),
        (7, "b"),
        (9, "whoever"),
        (9, "c"),
    ]


def test_a_page_is_named_with_its_line_and_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nThe relay sends it anew.\n")

    assert command.objections(page) == ["page.md:3: Write 'again' in place of 'anew'."]
