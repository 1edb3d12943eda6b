"""The prose in code: docstrings, comments, and every text of a few words that is not SQL."""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from tests.prose.pages import ROOT, Block

CHECKED = ("*.py", "relay/**/*.py", "spark/**/*.py")
# Their texts are SQL, code and input of tests: their docstrings and comments are read alone.
COMMENTED = ("bench", "demo", "examples", "migrations", "tests")

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
VAGUE = re.compile(r"(?:Give|Tell|Say)s?\b(?! up\b)")
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Source|Yields):$")
ENTRY = re.compile(r"^ {4}(?=\S)(?:[\w*`.,\s]+?: )?")
ITEM = re.compile(r"^- ")
DRAWING = re.compile(r"[─│┌└┬┴►]|-->|\S {3,}\S")
CODE = re.compile(r"`[^`]*`|https?://\S+")
DIRECTIVE = re.compile(r"\b(?:noqa(?:: [A-Z]+\d+(?:, [A-Z]+\d+)*)?|type: ignore(?:\[[\w, -]+\])?|fmt: skip)[ #-]*")
FEWEST = 4  # words of a text: fewer are a name, a column or a piece of SQL
SQL = re.compile(r"\b(?:AND|AS|BY|FROM|INTO|LIMIT|OR|SET|TABLE|VALUES|WHEN|WHERE|WITH)\b")


def files() -> list[Path]:
    patterns = [*CHECKED, *(f"{folder}/**/*.py" for folder in COMMENTED)]
    return sorted({file for pattern in patterns for file in ROOT.glob(pattern)})


def verbs(source: str) -> Iterator[Block]:
    """Return the first words of docstrings that do not say what the caller gets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (found := VAGUE.match(ast.get_docstring(node) or "")):
            yield Block(node.body[0].lineno, found.group())


def blocks_of_code(source: str, *, texts: bool = True) -> Iterator[Block]:
    """Read the prose of a module by paragraph, entry, comment and text; code in a sentence counts as one word."""
    tree = ast.parse(source)
    blocks = [*_docstrings(tree), *_comments(source), *(_texts(tree) if texts else ())]
    for block in sorted(blocks):
        if text := CODE.sub("`code`", " ".join(block.text.split())).strip():
            yield Block(block.line, text)


def _docstrings(tree: ast.Module) -> Iterator[Block]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            yield from _paragraphs(docstring, node.body[0].lineno)


def _paragraphs(docstring: str, line: int) -> Iterator[Block]:
    """Read paragraphs, list items and the entries of sections; examples and drawings are left out."""
    in_section = False
    for paragraph in re.finditer(r"(?:.*\S.*(?:\n|$))+", docstring):
        lines = paragraph.group().splitlines()
        start = line + docstring.count("\n", 0, paragraph.start())
        in_section = (in_section and lines[0].startswith(" ")) or any(map(SECTION.match, lines))
        if not any(map(DRAWING.search, lines)) and (in_section or not lines[0].startswith(" ")):
            yield from _entries(lines, start)


def _entries(lines: list[str], start: int) -> Iterator[Block]:
    """Read a paragraph; an item of a list and an entry of a section are sentences by themselves."""
    found: list[Block] = []
    in_section = False
    for number, each in enumerate(lines, start):
        if SECTION.match(each):
            in_section = True
        elif ITEM.match(each) or not found or (in_section and ENTRY.match(each)):
            in_section = in_section or each.startswith(" ")
            found.append(Block(number, (ENTRY if in_section else ITEM).sub("", each)))
        else:
            found[-1] = Block(found[-1].line, f"{found[-1].text} {each.strip()}")
    yield from found


def _comments(source: str) -> Iterator[Block]:
    """Read comments; those that stand alone on lines below each other are one."""
    start, text, last = 0, "", (-1, -1)
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        words = DIRECTIVE.sub("", token.string.lstrip("#")).strip(" #")
        line, column = token.start
        stands_alone = not token.line[:column].strip()
        if text and not (stands_alone and last == (line - 1, column)):
            yield Block(start, text)
            text = ""
        start = start if text else line
        text = f"{text} {words}".strip()
        last = (line, column) if stands_alone else (-1, -1)
    if text:
        yield Block(start, text)


def _texts(tree: ast.Module) -> Iterator[Block]:
    """Read what errors, the log, the command line, findings and metrics say, and each other text."""
    read: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            read.add(node.body[0].value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.JoinedStr):
            read.update(node.values)
        if isinstance(node, ast.expr) and node not in read:
            text = _text(node).strip()
            if len(text.split()) >= FEWEST and not SQL.search(text):
                yield from _paragraphs(text, node.lineno)


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) if isinstance(part, ast.Constant) else "`code`" for part in parts)
        case _:
            return ""
