"""`python -m tests.prose`: check the pages, and docstrings, comments, errors and help texts, by rules.py."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.prose.code import COMMENTED, blocks_of_code, files, verbs
from tests.prose.pages import ROOT, Block, blocks, pages
from tests.prose.rules import findings


def objections(path: Path) -> list[str]:
    """Return what the rules object to in a page or a module, a line for each."""
    text, texts = path.read_text(), path.relative_to(ROOT).parts[0] not in COMMENTED
    found = told(text, texts=texts) if path.suffix == ".py" else _told_of(blocks(text))
    return [f"{path.relative_to(ROOT).as_posix()}:{line}: {message}" for line, message in found]


def told(source: str, *, texts: bool = True) -> list[tuple[int, str]]:
    """Return what the rules object to in the source of a module, each with its line."""
    vague = [(line, f"'{verb}': say what the caller gets: Return, Yield, Whether.") for line, verb in verbs(source)]
    return sorted([*_told_of(blocks_of_code(source, texts=texts)), *vague])


def _told_of(read: Iterable[Block]) -> list[tuple[int, str]]:
    return [(block.line, each.message) for block in read for each in findings(block.text)]


if __name__ == "__main__":
    checked = [*pages(), *files()]
    objected = [line for path in checked for line in objections(path)]
    print("\n".join(objected) or f"{len(checked)} pages and modules pass")
    sys.exit(bool(objected))
