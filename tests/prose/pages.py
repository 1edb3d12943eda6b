"""The pages that are checked, and their text without markup."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")

MARKDOWN = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A paragraph, heading, list item or table cell, with the line at which it begins."""

    line: int
    text: str


def pages() -> list[Path]:
    return sorted({page for pattern in CHECKED for page in ROOT.glob(pattern)})


def programs(page: str, language: str = "python") -> list[str]:
    """Return the blocks of code in this language that a page has."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def blocks(page: str) -> Iterator[Block]:
    """Read a page by block. Blocks of code and HTML are left out; code in a sentence counts as one word."""
    line = 0
    for token in MARKDOWN.parse(page):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield Block(line, "".join(_text(child) for child in token.children or ()))


def _text(token: Token) -> str:
    match token.type:
        case "text":
            return token.content
        case "code_inline":
            return "`code`"
        case "softbreak" | "hardbreak":
            return " "
        case "image":
            return token.content
        case _:
            return ""
