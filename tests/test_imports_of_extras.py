"""What an extra is for imports no library that the extra does not install."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# The finder that stands first refuses what is not installed.
PROGRAM = """
import importlib, json, sys

given = json.load(sys.stdin)

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in given["refused"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
if given["is_django"]:
    import django
    from django.conf import settings
    apps = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")]
    settings.configure(INSTALLED_APPS=[*apps, "relay.django"])
    django.setup()
for name in given["modules"]:
    importlib.import_module(name)
"""


def installed_by(requirement: Requirement) -> Iterator[str]:
    """Yield the distributions that an installation of it brings."""
    waiting, seen = [requirement], set[tuple[str, str]]()
    while waiting:
        wanted = waiting.pop()
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            yield canonicalize_name(wanted.name)
            lines = map(Requirement, _requires(wanted.name))
            waiting += [each for each in lines if each.marker is None or each.marker.evaluate({"extra": extra})]


def _requires(name: str) -> list[str]:
    if name == "outbox-relay":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"].items()
        of_extras = [f"{line}; extra == '{extra}'" for extra, lines in extras for line in lines]
        return [*project["dependencies"], *of_extras]
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # of another platform, or optional
        return []


def imported(package: str, *but: str) -> list[str]:
    """Return the modules of a package, and what of relay their functions import."""
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    found = {_name(file): file for file in files if not _name(file).startswith(but or ("-",))}
    nested = (node for file in found.values() for node in ast.walk(ast.parse(file.read_text())))
    names = {node.module for node in nested if isinstance(node, ast.ImportFrom) and node.module}
    return sorted({*found, *(name for name in names if name.startswith("relay.") and not name.startswith(but or "-"))})


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


OF_CONSUMERS = (
    *(f"relay.testing.{name}" for name in ("handed", "harness", "hindering", "memory", "scenario")),
    "relay.consume",
)
OF_LIBRARIES = tuple(f"relay.outbox.{name}" for name in ("alchemy", "orm", "by_asyncpg", "by_django"))


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("", imported("relay.outbox", *OF_LIBRARIES)),
        ("testing", imported("relay.testing", *OF_CONSUMERS, "relay.testing.django", "relay.django")),
        ("django", [*imported("relay.django"), "relay.testing.django"]),
    ],
)
def test_an_extra_has_what_its_modules_import(extra: str, modules: list[str]) -> None:
    allowed = {*installed_by(Requirement(f"outbox-relay[{extra}]")), "psycopg-binary", "pytest"}
    owners = packages_distributions().items()
    refused = [top for top, names in owners if not allowed & {canonicalize_name(name) for name in names}]
    assert "aiormq" in refused
    given = {"refused": refused, "modules": modules, "is_django": extra == "django"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=False,
        cwd=ROOT,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
