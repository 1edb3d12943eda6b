"""The OpenAPI document is the one that is committed, and the console answers as it says, whatever it is asked."""

import asyncio
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as budget
from schemathesis import checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from relay.config.settings import Settings
from relay.console.api.openapi import as_text, document
from relay.console.api.router import router
from relay.operate.operation import Role
from tests.console.api.program import Program, tokens
from tests.console.site import serving, users
from tests.operate.rows import Rows

FILE = Path(__file__).parents[3] / "docs" / "openapi.json"
SCHEMA = schemathesis.openapi.from_dict(document(router.routes))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)]
CHECKS = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
VAGUE = {"Listing", "Look", "Order", "Change", "Chosen", "Retry", "Done", "Pause", "Resume", "Reasoned"}  # of what?
EXAMPLES = 15  # of each operation
WRITING = "post"
LOOKING = ("/look", "/preview", "/reveal", "/export")  # how paths end that read by a POST


def test_the_document_is_the_committed_one() -> None:
    words = "run `.venv/bin/python -m relay.console.api > docs/openapi.json`"
    assert FILE.read_text() == as_text(document(router.routes)), words


async def test_the_document_is_published(program: Program) -> None:
    answer = await program.get("/openapi.json")

    assert answer.json() == document(router.routes)


def test_what_the_document_names_is_named_once_and_says_its_noun() -> None:
    """A generated client makes a file of each operation, and a class of each schema."""
    told = document(router.routes)
    ids = [operation["operationId"] for item in told["paths"].values() for operation in item.values()]
    schemas = told["components"]["schemas"]

    assert len(ids) == len(set(ids))
    assert [each for each in ids if "api_v1" in each] == []
    assert {name: schema["title"] for name, schema in schemas.items() if schema["title"] != name} == {}
    assert [name for name in schemas if "_" in name or name in VAGUE] == []


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # schemathesis does
async def test_no_request_is_answered_otherwise_than_documented(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    head = rows.parked()
    rows.parked(behind=head)
    rows.quarantined("nowhere")
    rows.node()
    token = tokens(tmp_path)[Role.OWNER]
    async with serving(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as address:
        for operation in OPERATIONS:
            await asyncio.to_thread(_ask, operation, address, token)


def _ask(operation, address: str, token: str) -> None:  # type: ignore[no-untyped-def]
    @seed(7)
    @budget(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case) -> None:  # type: ignore[no-untyped-def]
        case.call_and_validate(
            base_url=address, headers={"Authorization": f"Bearer {token}"}, checks=CHECKS, timeout=30
        )

    ask()


@pytest.mark.parametrize(
    "path", sorted({each.path for each in OPERATIONS if each.method == WRITING and not each.path.endswith(LOOKING)})
)
def test_each_operation_that_changes_something_takes_a_key(path: str) -> None:
    parameters = document(router.routes)["paths"][path][WRITING]["parameters"]

    assert ("Idempotency-Key", True) in [(each["name"], each["required"]) for each in parameters]
