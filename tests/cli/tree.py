"""All commands and their arguments."""

from collections.abc import Iterator

from cyclopts import App
from cyclopts.argument import Argument

from relay.cli.command import app


def commands(tree: App, *path: str) -> Iterator[tuple[str, App]]:
    if tree.default_command is not None:
        yield " ".join(path), tree
    for name in tree:
        if not name.startswith("-"):
            yield from commands(tree[name], *path, name)


TREE = dict(commands(app()))


def arguments(command: str) -> list[Argument]:
    return [each for each in TREE[command].assemble_argument_collection() if each.show]
