"""The check of the prose reads docstrings, comments and texts, and leaves code and SQL out."""

from pathlib import Path

import pytest

from tests.prose import __main__ as command
from tests.prose.code import blocks_of_code, files
from tests.prose.examples import EXAMPLES
from tests.prose.pages import ROOT

PLACES = [
    '"""{}"""\n',
    'class Row:\n    """{}"""\n',
    'def take() -> None:\n    """Take a row.\n\n    {}\n    """\n',
    'def take() -> None:\n    """Take a row.\n\n    Raises:\n        BusyError: {}\n    """\n',
    "# {}\n",
    "rows = 5  # {}\n",
    'raise BusyError("{}")\n',
    'raise BusyError(f"row {{row}}: {}")\n',
    'app = App(help="{}")\n',
    'log.error("relay.stopped", reason="{}")\n',
    'REMEDY = "{}"\n',
    'finding = (Verdict.FAILED, f"{{words}}: {}")\n',
    "rows = 5  # noqa: S101, PT018  # {}\n",
    "rows = 5  # type: ignore[misc]  ({})\n",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("was", "better"), EXAMPLES)
def test_each_example_is_objected_to_wherever_it_stands_in_code(
    place: str, was: str, better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    module = tmp_path / "module.py"

    module.write_text(place.format(was))
    assert command.objections(module) != []

    module.write_text(place.format(better))
    assert command.objections(module) == []


@pytest.mark.parametrize("verb", ["Give", "Tell", "Say"])
def test_a_docstring_begins_with_what_the_caller_gets(verb: str) -> None:
    assert told(f'"""{verb} the rows."""\n') == [f"1: '{verb}': say what the caller gets: Return, Yield, Whether."]
    assert told(f'"""Return the rows."""\n# {verb} the rows.\n') == []
    assert told('"""Give up the rows."""\n') == []


def test_texts_of_a_test_are_input_and_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    module = tmp_path / "tests" / "module.py"
    module.parent.mkdir()
    module.write_text('# Whoever comes\nTEXT = "whoever comes to the door"\n')

    assert command.objections(module) == ["tests/module.py:1: 'Whoever' does not name who acts."]


def test_entries_comments_and_messages_are_sentences_by_themselves() -> None:
    source = '''\
"""A module of two
lines.

- an item
  of two lines
- another

    whoever = "an example"

row ──somebody──> broker
"""
LIMIT = 3  # rows, `at once`

# A comment
# of two lines.

# Another  # noqa: S101
SQL = "-- whoever SELECT none FROM row WHERE id = 1"
NAME = "whoever it is"


def take(rows: int) -> None:
    """Take rows.

    Args:
        rows: as many
            as there are.
    Raises:
        ValueError: too many.
    """
    raise ValueError(f"{rows} rows "
        f"are too many")
'''
    assert [(block.line, block.text) for block in blocks_of_code(source)] == [
        (1, "A module of two lines."),
        (4, "an item of two lines"),
        (6, "another"),
        (12, "rows, `code`"),
        (14, "A comment of two lines."),
        (17, "Another"),
        (23, "Take rows."),
        (26, "as many as there are."),
        (29, "too many."),
        (31, "`code` rows are too many"),
    ]


def test_every_module_is_checked() -> None:
    parts = ("relay", "spark", "bench", "demo", "examples", "migrations", "tests")
    there = {file for part in parts for file in (ROOT / part).rglob("*.py")}

    assert there - set(files()) == set()


def told(source: str) -> list[str]:
    return [f"{line}: {message}" for line, message in command.told(source)]
