"""Which files a reader opens on a way: those that run in each passage, and those of the names that they use then.

A line that runs may call a function of another file or render a template. It may use a statement of SQL, a class of
data or a compiled function. Each of these files counts. An import alone does not.
"""

import ast
import asyncio
import dis
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import CO_OPTIMIZED, getattr_static
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from psycopg.sql import SQL, Composed

ROOT = Path(__file__).parents[2]
FOLDERS = ("relay/", "spark/outbox_spark/")
KNOWN = {
    "relay/errors.py",
    "relay/logger.py",
    "relay/runtime/backoff.py",
    "spark/outbox_spark/errors.py",
}  # by their names
PASSAGES = 5
TELLING = 20  # characters by which a statement is recognised
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}

OnLine = Callable[[FrameType, str, object], Any]


class Lines:
    """The lines of one function that ran.

    Attributes:
        owner: its first argument in the last call: the object of a method.
    """

    def __init__(self, frame: FrameType) -> None:
        self.names = frame.f_globals
        self.owner: object = None
        self.ran: set[int] = set()

    def note(self, frame: FrameType, event: str, _: object) -> OnLine:
        if event == "line":
            self.ran.add(frame.f_lineno)
        return self.note


class Tracer:
    """Traces each thread that starts after it is installed, in passages."""

    def __init__(self) -> None:
        self._lines: dict[CodeType, Lines] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> OnLine | None:
        code, found = frame.f_code, self._lines
        # The body of a module or a class has no optimized locals: it runs when the file is imported.
        if found is None or event != "call" or not code.co_flags & CO_OPTIMIZED or own_file(code.co_filename) is None:
            return None
        lines = found.setdefault(code, Lines(frame))
        lines.ran.add(frame.f_lineno)
        if code.co_varnames[:1] == ("self",):
            lines.owner = frame.f_locals.get("self")
        return lines.note

    @contextmanager
    def passage(self) -> Iterator[set[str]]:
        """Yield the files that are opened within; they are known behind the block."""
        opened: set[str] = set()
        ran: dict[CodeType, Lines] = {}
        self._lines = ran
        try:
            yield opened
        finally:
            self._lines = None
            for code, lines in ran.items():
                opened |= files_of(code, lines)

    async def always_opened(self, passage: Callable[[], Awaitable[None]]) -> list[str]:
        """Return the files that every passage opens: what only some need is timers' work."""
        always: set[str] | None = None
        for _ in range(PASSAGES):
            await asyncio.sleep(0.3)
            with self.passage() as opened:
                await passage()
            always = opened if always is None else always & opened
        return sorted((always or set()) - KNOWN)


@contextmanager
def tracing() -> Iterator[Tracer]:
    """Install a tracer, in this thread and in those that start later."""
    tracer = Tracer()
    before = sys.gettrace()
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(before)
        threading.settrace(before)


@cache
def own_file(name: str) -> str | None:
    """Return a file's name from the root on if it is one of ours."""
    own = name.removeprefix(f"{ROOT}/")
    return own if own != name and own.startswith(FOLDERS) else None


def files_of(code: CodeType, lines: Lines) -> set[str]:
    """Return the file of these lines, and the files of the names that they use."""
    own = own_file(code.co_filename)
    found = {own} if own is not None else set[str]()
    if code.co_filename.endswith(".py"):
        for path in names_used(code, lines.ran):
            origin = origin_of_global(path, code, lines.names) or origin_of_attribute(path, lines.owner)
            if own and origin and origin.split("/")[0] == own.split("/")[0]:  # some statements of Spark begin alike
                found.add(origin)
    return found


def names_used(code: CodeType, ran: Iterable[int]) -> Iterator[tuple[str, ...]]:
    """Yield the names that these lines load, each with the attributes behind it."""
    line = code.co_firstlineno
    path: tuple[str, ...] = ()
    for each in dis.get_instructions(code):
        line = (each.positions.lineno if each.positions else None) or line
        if path and each.opname in ATTRIBUTES:
            path = (*path, each.argval)
            continue
        if path:
            yield path
            path = ()
        if line in ran and each.opname in {"LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF"}:
            path = (each.argval,)


def origin_of_global(path: tuple[str, ...], code: CodeType, names: dict[str, Any]) -> str | None:
    """Return the file in which a constant, a class or a compiled function was made that a file has by an import."""
    name, *attributes = path
    value = names.get(name)
    if isinstance(value, ModuleType) and attributes:
        name, value = attributes[0], getattr(value, attributes[0], None)
        module = f"{names[path[0]].__name__}:{name}"
    else:
        module = imports(code.co_filename).get(name, "")
    return None if is_traced(value) or isinstance(value, ModuleType) else file_of_name(module)


def origin_of_attribute(path: tuple[str, ...], owner: object) -> str | None:
    """Return the file of a statement or a compiled function that an object has."""
    if path[0] != "self" or owner is None:
        return None
    value = owner
    for name in path[1:]:
        if isinstance(getattr_static(type(value), name, None), property):
            return None
        value = getattr(value, name, None)
        if isinstance(value, str | bytes | SQL | Composed):
            return file_of_statement(text_of(value))
        if is_compiled(type(value)):
            return file_of_name(f"{type(value).__module__}:")
    return None


def is_traced(value: object) -> bool:
    return hasattr(value, "__code__")


def is_compiled(kind: type) -> bool:
    return (getattr(sys.modules.get(kind.__module__), "__file__", None) or "").endswith(".so")


@cache
def imports(file: str) -> dict[str, str]:
    """Return from where a file has each name: `module:name`."""
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def file_of_name(name: str) -> str | None:
    """Return the file in which `module:name` was made: not a package's `__init__`, which passes names on."""
    module, _, attribute = name.partition(":")
    file_name = getattr(sys.modules.get(module), "__file__", None)
    if file_name is None or own_file(file_name) is None:
        return None
    file = Path(file_name)
    if file.suffix == ".so":
        file = file.with_name(f"{file.name.partition('.')[0]}.pyx")
    if file.name == "__init__.py" and attribute in imports(str(file)):
        return file_of_name(imports(str(file))[attribute])
    return own_file(str(file))


def text_of(statement: str | bytes | SQL | Composed) -> str:
    """Return the text of a statement, without what is only layout."""
    text = statement.decode(errors="replace") if isinstance(statement, bytes) else statement
    return " ".join((text if isinstance(text, str) else text.as_string()).split())


@cache
def statements() -> dict[str, str]:
    """Return the files of the constants that are statements, by how their text begins: up to the first name in it."""
    return {
        begins: file
        for module in list(sys.modules.values())
        if (file := own_file(getattr(module, "__file__", None) or "")) is not None
        for value in vars(module).values()
        if isinstance(value, str | SQL) and len(begins := text_of(value).partition("{")[0]) >= TELLING
    }


def file_of_statement(text: str) -> str | None:
    """Return the file that has the constant of this statement."""
    return next((file for begins, file in statements().items() if text.startswith(begins)), None)
