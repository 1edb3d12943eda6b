"""`relay topology`."""

import asyncio
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Audit
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.operations import RemoteBrokerOptions
from relay.cli.options import BrokerOptions, Output
from relay.cli.printing import Row, complain, print_json, print_table
from relay.config.keys import as_toml
from relay.config.topology import Binding
from relay.observe.log import keep_libraries_quiet
from relay.operate.asked import Nothing
from relay.operate.definitions import definitions
from relay.operate.routes import declare
from relay.servers.rabbitmq import topology
from relay.servers.rabbitmq.topology import Declared, Standing, Thing

NOTHING_LISTED = "nothing is listed: `relay config example` shows how, at [[topology.exchanges]]"

app = App(name="topology", help="The exchanges, queues and bindings that relay.toml lists.")


@app.command
def apply(
    *,
    options: RemoteBrokerOptions = RemoteBrokerOptions(),
    audit: Audit = Audit(),
    dry_run: Annotated[bool, Parameter(help="Tell what is missing and what differs, and declare nothing.")] = False,
    output: Output = "text",
) -> ExitCode:
    """Declare what is missing and compare the rest; nothing that is there is changed or taken away.

    With --why it is noted in the audit, and the relays try the routes in quarantine; that takes the database, too.
    Exits with 1 when something differs or cannot be declared, with 3 when other things were declared nevertheless.
    """
    keep_libraries_quiet()
    results = _apply(options, audit, dry_run=dry_run)
    if not results:
        complain(NOTHING_LISTED)
    if output == "json":
        print_json(results)
    else:
        rows = [(each.standing, each.kind, each.name, _words(each)) for each in results]
        print_table(("standing", "kind", "name", "words"), rows)
    bad = sum(each.standing in topology.BAD for each in results)
    if bad:
        complain(f"{bad} of {len(results)} do not stand as they are listed")
    return exit_code(done=sum(each.standing is Standing.DECLARED for each in results), left=bad)


@app.command
def show(*, options: BrokerOptions = BrokerOptions(), output: Output = "text") -> ExitCode:
    """Print what is listed; as JSON in the form of RabbitMQ's definitions."""
    settings = options.load().settings
    if not topology.listed(settings.topology):
        complain(NOTHING_LISTED)
    if output == "json":
        print_json(definitions(settings))
        return ExitCode.DONE
    rows = [_row(each) for each in topology.listed(settings.topology)]
    print_table(("kind", "name", "type", "durable", "arguments"), rows)
    return ExitCode.DONE


def _apply(options: RemoteBrokerOptions, audit: Audit, *, dry_run: bool) -> list[Declared]:
    """Declare or compare: without --why and --server by the broker alone, as before the tables are there."""
    if dry_run:
        return options.operations().do(declare.compare, Nothing())
    if options.server is None and not audit.reason:
        settings = options.load().settings
        return asyncio.run(topology.apply(settings.broker, settings.topology))
    audit.check_reason()
    wanted = declare.ApplyTopology(why=audit.reason)
    return options.operations().do(declare.apply, wanted, by=audit.operator)


def _words(result: Declared) -> str:
    return "; ".join(each for each in (result.words, result.remedy) if each)


def _row(thing: Thing) -> Row:
    kind, name = topology.kind_of(thing), topology.name_of(thing)
    if isinstance(thing, Binding):
        return kind, name, "", "", as_toml(thing.arguments)
    return kind, name, thing.type, "durable" if thing.durable else "transient", as_toml(thing.amqp_arguments())
