"""The links between the pages lead to a page and a heading, and the commands that help in trouble exist."""

import re
import shlex
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from cyclopts import MissingArgumentError
from markdown_it.token import Token

from relay.cli.command import app
from tests.prose.pages import MARKDOWN, ROOT, pages

HELPFUL = {"README.md", "docs/choose-settings.md", "docs/troubleshooting.md"}
COMMAND = re.compile(r"^relay [a-z].*?(?=$| +#| \|| >| &)")

# What stands for a number, and for a message id, on the pages.
PLACEHOLDERS = (
    (re.compile(r"\b(ID|LANE)\b"), "7"),
    (re.compile(r"\b[0-9a-f]{4}\.\.\."), "0c6f0f3e-7d53-4c43-a8a2-0d5b2f3f1c11"),
)


def inline(page: Path) -> list[Token]:
    return [child for token in MARKDOWN.parse(page.read_text()) for child in token.children or ()]


def anchors(page: Path) -> set[str]:
    """Return what a link may name on a page: its headings, as GitHub writes them, and its own ids."""
    tokens = MARKDOWN.parse(page.read_text())
    headings = (after.content for token, after in pairwise(tokens) if token.type == "heading_open")
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="(.+?)">', page.read_text()))


def broken(page: Path) -> list[str]:
    links = [str(token.attrs["href"]) for token in inline(page) if token.type == "link_open"]
    return [link for link in links if "://" not in link and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def commands(page: Path) -> list[str]:
    texts = [token.content for token in inline(page) if token.type == "code_inline"]
    texts += [
        line
        for token in MARKDOWN.parse(page.read_text())
        if token.type == "fence"
        for line in token.content.splitlines()
    ]
    return [filled(found.group()) for text in texts if (found := COMMAND.match(text))]


def filled(command: str) -> str:
    for placeholder, value in PLACEHOLDERS:
        command = placeholder.sub(value, command)
    return command


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b.c` d\n\n[a](#a-bc-d) [b](#none) [c](page.md#a-bc-d) [d](other.md) [e](https://example.org/#e)\n"
    )

    assert broken(page) == ["#none", "other.md"]


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages()])
def test_each_command_exists_with_its_flags(page: str) -> None:
    found = commands(ROOT / page)

    for command in found:
        with suppress(MissingArgumentError):  # `relay reconcile` in a sentence names the command only
            app().parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
    assert found != [] or page not in HELPFUL


def test_each_fault_names_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "failure-model.md").read_text())

    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
    assert len(named) > 50


def test_the_code_names_pages_that_exist() -> None:
    named = {
        name
        for folder in ("relay", "spark", "config", "tests", "migrations", "examples", "bench", "demo")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".toml", ".yaml", ".yml", ".sql", ".conf"}
        for name in re.findall(r"docs/[\w/-]+\.md", file.read_text())
    }

    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert named != set()
