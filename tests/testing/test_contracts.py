"""A test of an application compares a declared class with a committed export."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from relay.errors import ConfigurationError
from relay.operate.events.contract import as_text, contract_of, document
from relay.outbox import event
from relay.outbox.declared import declaration_of
from relay.testing import assert_compatible


@event("InvoiceIssued", version=2, key=("customer", None))
class Issued(BaseModel):
    amount: int


@event("InvoiceIssued", version=2, key=("customer", None))
class Rounded(BaseModel):
    amount: float


@event("InvoiceIssued", version=2, key=("customer", None))
class Renamed(BaseModel):
    sum: int


@event("InvoiceIssued", version=3, key=("customer", None))
class Newer(BaseModel):
    amount: int


@pytest.fixture
def export(tmp_path: Path) -> Path:
    declaration = declaration_of(Issued)
    assert declaration is not None
    file = tmp_path / "InvoiceIssued.2.json"
    file.write_text(as_text(document([contract_of(declaration)])))
    return file


def test_a_class_that_reads_old_messages_is_compatible(export: Path) -> None:
    assert_compatible(Issued, export, require="full")
    assert_compatible(Rounded, str(export))


def test_a_class_that_does_not_fails_with_the_reasons(export: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_compatible(Renamed, export)

    assert str(failed.value) == (
        f"InvoiceIssued version 2 is NONE, not backward compatible with {export}:\n"
        "  a new reader, an old message: payload.sum is required, and may be missing\n"
        "  an old reader, a new message: payload.amount is required, and may be missing"
    )


def test_what_is_required_may_be_more(export: Path) -> None:
    with pytest.raises(AssertionError, match="is BACKWARD, not full compatible"):
        assert_compatible(Rounded, export, require="full")


def test_a_version_that_the_export_does_not_have_is_told(export: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no InvoiceIssued version 3: export it again"):
        assert_compatible(Newer, export)


def test_a_class_that_is_not_declared_is_refused(export: Path) -> None:
    with pytest.raises(TypeError, match="put @event above it"):
        assert_compatible(BaseModel, export)
