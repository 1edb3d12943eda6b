"""`relay events`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.options import ConfigFile, Output
from relay.cli.printing import complain, counted, print_json, print_table
from relay.config.loading import load
from relay.errors import UsageError
from relay.operate.events.addresses import address_of
from relay.operate.events.asyncapi import asyncapi
from relay.operate.events.check import EventVerdict, Require, compare_all
from relay.operate.events.contract import as_text, contract_of, document, read_contracts
from relay.operate.events.modules import declared_in

MOST_REASONS = 20  # of an event, in the table

Module = Annotated[str, Parameter(name="MODULE", help="Module that names declared classes, such as app.events.")]

app = App(name="events", help="The events that an application declares with @event.")


@app.command(name="list")
def list_(first: Module, /, *more: Module, config: ConfigFile = None, output: Output = "text") -> ExitCode:
    """List the events of modules, with the exchange, the routing key and the listed queues of their messages."""
    settings = load(config=config).settings
    rows: list[dict[str, Any]] = []
    for each in declared_in((first, *more)):
        declared, address = each.declaration, address_of(each.declaration, settings)
        rows.append({
            "event_type": declared.event_type,
            "version": declared.version,
            "aggregate_type": declared.aggregate_type,
            "aggregate_id": declared.key_field,
            "class": each.place,
            "exchange": address.exchange,
            "routing_key": address.routing_key,
            "queues": address.queues,
        })  # fmt: skip
    if output == "json":
        print_json(rows)
        return ExitCode.DONE
    columns = [name.replace("_", " ") for name in rows[0]]
    print_table(columns, [[*list(row.values())[:-1], ", ".join(row["queues"])] for row in rows])
    return ExitCode.DONE


@app.command
def export(
    first: Module,
    /,
    *more: Module,
    form: Annotated[
        Literal["json-schema", "asyncapi"],
        Parameter(name="--format", help="What `relay events check` reads, or AsyncAPI 3.0 with the topology."),
    ] = "json-schema",
    file: Annotated[Path | None, Parameter(help="Write it to this file, and nothing to stdout.")] = None,
    config: ConfigFile = None,
) -> ExitCode:
    """Print the schemas of the events of modules as JSON; the same events always give the same text."""
    modules = (first, *more)
    classes = declared_in(modules)
    if form == "asyncapi":
        exported = asyncapi(classes, modules, load(config=config).settings)
    else:
        exported = document(contract_of(each.declaration) for each in classes)
    if file is None:
        sys.stdout.write(as_text(exported))
        return ExitCode.DONE
    try:
        file.write_text(as_text(exported))
    except OSError as error:
        raise UsageError(f"file {file} cannot be written: {error.strerror}") from None
    return ExitCode.DONE


@app.command
def check(
    first: Module,
    /,
    *more: Module,
    against: Annotated[Path, Parameter(help="An earlier `relay events export`.")],
    require: Annotated[
        Require, Parameter(help="New readers take old messages (backward), old ones new messages (forward), or both.")
    ] = Require.BACKWARD,
    output: Output = "text",
) -> ExitCode:
    """Compare the events of modules with an earlier export; exit with 1 if one does not keep what is required."""
    old = read_contracts(against)
    new = [contract_of(each.declaration) for each in declared_in((first, *more))]
    compared = compare_all(old, new)
    if output == "json":
        print_json(compared)
    else:
        rows = [(each.verdict, each.event_type, each.version, reason) for each in compared for reason in _reasons(each)]
        print_table(("verdict", "event type", "version", "reason"), rows)
    broken = [each for each in compared if not each.keeps(require)]
    if broken:
        complain(f"of {counted(len(compared), 'event')}, {len(broken)} not {require} compatible with {against}")
    return ExitCode.FAILED if broken else ExitCode.DONE


def _reasons(comparison: EventVerdict) -> list[str]:
    reasons = list(comparison.reasons) or [""]
    more = len(reasons) - MOST_REASONS
    return [*reasons[:MOST_REASONS], f"and {more} more (--output json lists all)"] if more > 0 else reasons
