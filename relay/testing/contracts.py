"""A declared class against the export that a team or its readers have committed."""

from os import PathLike
from pathlib import Path

from relay.errors import ConfigurationError
from relay.operate.events.check import Require, compare
from relay.operate.events.contract import contract_of, read_contracts
from relay.outbox.declared import declaration_of


def assert_compatible(declared: type, export: str | PathLike[str], *, require: str = "backward") -> None:
    """Check that a declared class keeps what its event in an export of `relay events export` promises.

    Args:
        require: `backward`, `forward` or `full`, as `relay events check --require` takes it.

    Raises:
        AssertionError: it does not keep it; the message has the reasons.
        ConfigurationError: the file is no export, or has no such version of the event.
    """
    if (declaration := declaration_of(declared)) is None:
        raise TypeError(f"the class {declared.__name__} is not declared: put @event above it")
    required = Require(require)
    new = contract_of(declaration)
    old = {each.name: each for each in read_contracts(Path(export))}.get(new.name)
    if old is None:
        raise ConfigurationError(f"file {export} has no {new}: export it again")
    found = compare(old, new)
    if not found.keeps(required):
        reasons = "\n  ".join(found.reasons)
        raise AssertionError(f"{new} is {found.verdict}, not {required} compatible with {export}:\n  {reasons}")
