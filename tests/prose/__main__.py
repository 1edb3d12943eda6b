"""`python -m tests.prose`: check README, CHANGELOG, CONTRIBUTING, docs and the pages of examples by rules.py."""

import sys
from pathlib import Path

from tests.prose.pages import ROOT, blocks, pages
from tests.prose.rules import findings


def objections(page: Path) -> list[str]:
    """Return what the rules object to in a page, a line for each."""
    name = page.relative_to(ROOT).as_posix()
    return [
        f"{name}:{block.line}: {each.message}" for block in blocks(page.read_text()) for each in findings(block.text)
    ]


if __name__ == "__main__":
    checked = pages()
    objected = [line for page in checked for line in objections(page)]
    print("\n".join(objected) or f"{len(checked)} pages pass")
    sys.exit(bool(objected))
