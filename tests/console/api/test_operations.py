"""Each operation of the table has a command, a route, a right, and a page or a reason why not."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from relay import operate
from relay.console import pages
from relay.console.api.router import router
from relay.operate.operation import Effect, Operation, Role
from relay.operate.operations import OPERATIONS
from tests.cli.tree import arguments
from tests.console.routes import role_of

AnyOperation = Operation[Any, Any]
TABLE: list[AnyOperation] = [each for part in OPERATIONS.values() for each in part]
DOCUMENT = Path(__file__).parents[3] / "docs" / "openapi.json"

# What no command has the name of.
COMMANDS = {
    "dead-letters.look": "dead-letters list",
    "dead-letters.preview": "dead-letters retry",  # --dry-run
    "dead-letters.reveal": "dead-letters show",
    "failures.look": "failures list",  # --queue
    "nodes": "status",
    "parked.preview": "parked retry",  # --dry-run
    "parked.reveal": "parked show",
    "quarantine.preview": "quarantine reroute",  # --dry-run
    "replay.order": "replay",
    "replay.preview": "replay",  # --dry-run
    "topology.compare": "topology apply",  # --dry-run
}
# What no page does, and why.
NO_PAGE = {
    "batches.show": "the list shows all that is known of a batch",
    "dead-letters.look": "a look of a page goes on behind it, for minutes",
    "dead-letters.preview": "the page of a group shows the count",
    "dead-letters.reveal": "a letter is read where its queue is",
    "doctor": "the console looks by itself, and the page shows what it saw",
    "failures.list": "the console counts by itself, and the page shows what it saw",
    "failures.look": "a look of a page goes on behind it, for minutes",
    "nodes": "the page reads the pools in the same session",
    "parked.list": "the page of a group lists its rows",
    "parked.reveal": "the page of a message reveals what it says",
    "pool.status": "the page reads the nodes in the same session",
    "quarantine.preview": "the page of a route shows the counts",
    "status": "the console samples it, and the overview shows what it saw",
}


def modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def named(module: ModuleType) -> Iterator[AnyOperation]:
    """Yield the operations that the code of a module names."""
    for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = getattr(getattr(module, node.value.id, None), node.attr, None)
            chosen = found.values() if isinstance(found, dict) else [found]
            yield from (each for each in chosen if isinstance(each, Operation))


ROUTES = {
    route.operation_id: route
    for route in iter_route_contexts(router.routes)
    if isinstance(route.original_route, APIRoute) and route.include_in_schema
}
ON_PAGES = {operation.name for module in modules(pages) for operation in named(module)}


def test_the_table_has_each_operation_once() -> None:
    declared = {id(value) for module in modules(operate) for value in vars(module).values() if type(value) is Operation}

    assert {id(each) for each in TABLE} == declared
    assert len({each.id for each in TABLE}) == len(TABLE)


@pytest.mark.parametrize("operation", TABLE, ids=lambda each: each.name)
def test_an_operation_has_a_command_that_a_console_can_do(operation: AnyOperation) -> None:
    command = COMMANDS.get(operation.name) or operation.name.replace(".", " ").replace("_", "-")

    assert "--server" in [name for each in arguments(command) for name in each.names]


@pytest.mark.parametrize("operation", TABLE, ids=lambda each: each.name)
def test_an_operation_has_a_route_that_asks_for_its_right(operation: AnyOperation) -> None:
    route = ROUTES[operation.id]

    assert route.path == f"/api/v1{operation.path}"
    assert route.methods == {operation.method}
    assert role_of(route) == operation.role
    if operation.effect is not Effect.NOTHING:
        assert operation.role.includes(Role.OPERATOR)
    is_owners = operation.name.endswith((".discard", ".edit")) or operation.name == "topology.apply"
    assert (operation.role is Role.OWNER) == is_owners


def test_an_operation_has_a_page_or_a_reason_why_not() -> None:
    lacking = {each.name for each in TABLE} - ON_PAGES

    assert lacking == NO_PAGE.keys()


def test_each_exception_names_an_operation() -> None:
    assert {*COMMANDS, *NO_PAGE} <= {each.name for each in TABLE}


def test_a_client_made_of_the_document_has_every_operation(tmp_path: Path) -> None:
    made = tmp_path / "client"
    program = Path(sys.executable).with_name("openapi-python-client")

    subprocess.run(
        [program, "generate", "--path", DOCUMENT, "--output-path", made, "--meta", "none"], check=True, cwd=tmp_path
    )

    files = {file.stem for file in (made / "api").glob("*/*.py")} - {"__init__"}
    assert files == ROUTES.keys()
