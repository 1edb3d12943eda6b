"""`python -m tests.prose`: check README, CHANGELOG, CONTRIBUTING, docs and the pages of examples by rules.py."""

import sys
from pathlib import Path

from tests.prose.pages import ROOT, UNFINISHED, blocks, pages
from tests.prose.rules import findings


def objections(page: Path) -> list[str]:
    """Return what the rules object to in a page, a line for each."""
    name = page.relative_to(ROOT).as_posix()
    found = [
        f"{name}:{block.line}: {each.message}" for block in blocks(page.read_text()) for each in findings(block.text)
    ]
    if name not in UNFINISHED:
        return found
    return [] if found else [f"{name}: passes; take it off UNFINISHED in tests/prose/pages.py"]


if __name__ == "__main__":
    checked = pages()
    objected = [line for page in checked for line in objections(page)]
    print("\n".join(objected) or f"{len(checked)} pages: {len(UNFINISHED)} to be rewritten, the others pass")
    sys.exit(bool(objected))
