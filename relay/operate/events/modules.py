"""The events that modules of an application name."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from os.path import dirname
from sysconfig import get_path
from traceback import extract_tb
from types import ModuleType

import relay
from relay.errors import ConfigurationError, MissingExtraError, OutboxError, UsageError
from relay.outbox.declared import Declaration, declaration_of

LIBRARIES = (*map(get_path, ("stdlib", "platstdlib", "purelib", "platlib")), dirname(relay.__file__))
OF_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in LIBRARIES)


@dataclass(frozen=True, slots=True)
class DeclaredClass:
    """A declared class, and its name as Python finds it."""

    declaration: Declaration
    place: str  # app.events:InvoiceIssued


def declared_in(modules: Sequence[str]) -> list[DeclaredClass]:
    """Import modules and return the declared classes that they name, sorted by event and version.

    The current directory is on the path, as with `python -m`. What the modules print goes to stderr.

    Raises:
        UsageError: a module is not there, or names no declared class.
        ConfigurationError: a module cannot be imported, or two classes are one version of an event.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    found: dict[int, DeclaredClass] = {}
    for name in modules:
        named = {id(each.declaration): each for each in _named(_imported(name))}
        if not named:
            raise UsageError(f"module {name} names no class that @event declares")
        found.update({key: each for key, each in named.items() if key not in found})
    _refuse_repeats(list(found.values()))
    return sorted(found.values(), key=lambda each: (each.declaration.event_type, each.declaration.version or ""))


def _imported(name: str) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):
            return import_module(name)
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"there is no module {name}: run this in the folder from which Python imports it"
            ) from None
        raise ConfigurationError(_reason(name, error)) from None
    except (Exception, SystemExit) as error:  # the application's code may raise anything
        raise ConfigurationError(_reason(name, error)) from None


def _reason(name: str, error: BaseException) -> str:
    frames = extract_tb(error.__traceback__)[1:]  # without the one of this module
    places = [frame for frame in frames if not frame.filename.startswith("<")]  # Python's own, as `<frozen os>`
    # Libraries raise errors, too: the reader seeks the line of the application that has called them.
    own = [frame for frame in places if not frame.filename.startswith(OF_LIBRARIES)] or places
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    words = str(error) if isinstance(error, OutboxError) else f"{type(error).__name__}: {error}"
    return f"module {name} cannot be imported: {' '.join(words.split())}{place}"


def _named(module: ModuleType) -> Iterator[DeclaredClass]:
    for value in vars(module).values():
        if (declaration := declaration_of(value)) is not None:
            kind = declaration.kind
            yield DeclaredClass(declaration, f"{kind.__module__}:{kind.__qualname__}")


def _refuse_repeats(found: Sequence[DeclaredClass]) -> None:
    first: dict[tuple[str, str | None], DeclaredClass] = {}
    for each in found:
        declaration = each.declaration
        other = first.setdefault((declaration.event_type, declaration.version), each)
        if other is not each:
            version = "without a version" if declaration.version is None else f"in version {declaration.version}"
            raise ConfigurationError(
                f"{other.place} and {each.place} both declare {declaration.event_type} {version}: one message would"
                " have two schemas. Give one of them another version"
            )
