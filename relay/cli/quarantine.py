"""`relay quarantine`."""

from datetime import UTC, datetime
from typing import Annotated

import psycopg
from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Consent, Loss, check_reason, show_loss
from relay.cli.options import By, DatabaseOptions, DryRun, Output, Why, check_address
from relay.cli.printing import aside, complain, print_json, print_pairs, print_table, say
from relay.config.settings import Settings
from relay.engine.send.message import UnsendableError
from relay.engine.send.routes import Router
from relay.errors import UsageError
from relay.operate.quarantine import (
    Changed,
    QuarantinedRoute,
    WaitingRow,
    count_chosen,
    discard,
    list_chosen,
    list_routes,
    list_rows,
    probe,
    read_route,
    reroute,
    route_of,
)
from relay.operate.session import session
from relay.operate.whereabouts import RowId, row_ids
from relay.replay.job import operator

BULK_TIMEOUT = 600.0  # seconds for a statement: a route may have a million rows
LIST_COLUMNS = (
    "route", "exchange", "routing key", "rows", "behind", "since", "probes", "next probe by", "reason",
)  # fmt: skip
ROW_COLUMNS = ("id", "message id", "type", "key", "event", "written at", "attempts", "reason")

app = App(name="quarantine", help="See, reroute, discard or try what waits for a route that does not work.")

RouteId = Annotated[int, Parameter(help="Number of the route, as `list` tells it.", validator=validators.Number(gte=1))]
RowIds = Annotated[str, Parameter(name="ID", help="Ids or message ids of rows of the route; all of them unless given.")]


@app.command(name="list")
def list_(*, options: DatabaseOptions | None = None, output: Output = "text") -> int:
    """List the routes in quarantine, the oldest first."""
    database = (options or DatabaseOptions()).load().settings.database
    with session(database) as connection:
        routes = list_routes(connection, database.schema_name)
    if output == "json":
        print_json(routes)
    else:
        print_table(LIST_COLUMNS, [_list_row(route) for route in routes])
    return 0


@app.command
def show(
    id_: Annotated[str, Parameter(name="ID", help="Number of the route, or id or message id of a row in quarantine.")],
    /,
    *,
    options: DatabaseOptions | None = None,
    limit: Annotated[int, Parameter(help="At most so many rows.", validator=validators.Number(gte=1))] = 100,
    output: Output = "text",
) -> int:
    """Show a route and the first rows that wait for it."""
    (named,) = row_ids([id_])
    database = (options or DatabaseOptions()).load().settings.database
    with session(database) as connection:
        route = route_of(connection, database.schema_name, named)
        rows = list_rows(connection, database.schema_name, route.id, limit=limit)
    if output == "json":
        print_json({"route": route, "rows": rows})
        return 0
    print_pairs([(name.replace("_", " "), getattr(route, name)) for name in QuarantinedRoute.__dataclass_fields__])
    print_table(ROW_COLUMNS, [_row(row) for row in rows])
    if route.rows > len(rows):
        aside(f"{route.rows - len(rows)} more: --limit {route.rows} lists them all")
    return 0


@app.command(name="reroute")
def reroute_(
    route: RouteId,
    /,
    *ids: RowIds,
    to_exchange: Annotated[str | None, Parameter(help="In place of the route's; '' addresses a queue.")] = None,
    routing_key: Annotated[str | None, Parameter(help="In place of the route's.")] = None,
    why: Why = "",
    by: By = None,
    options: DatabaseOptions | None = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> int:
    """Send the rows of a route to another exchange or routing key, in order per key; the relay tries it first.

    Rows that only wait behind them keep their addresses, and follow.
    """
    if to_exchange is None and routing_key is None:
        raise UsageError("give --to-exchange, --routing-key, or both: where the rows go from now on")
    if not dry_run:
        check_reason(why)
    check_address(to_exchange, routing_key)
    rows = row_ids(ids)
    settings = (options or DatabaseOptions()).load().settings
    _check_allowed(settings, to_exchange)
    schema = settings.database.schema_name
    with session(settings.database, timeout=BULK_TIMEOUT) as connection:
        found = read_route(connection, schema, route)
        exchange = found.exchange if to_exchange is None else to_exchange
        key = found.routing_key if routing_key is None else routing_key
        verb = f"to exchange {exchange!r}, routing key {key!r}"
        if dry_run:
            say(f"would reroute {_count(count_chosen(connection, schema, found, rows)[0])} {verb}")
            return 0
        done = reroute(
            connection, schema, found, rows, exchange=exchange, routing_key=key, by=operator(by), why=why.strip()
        )
    return _report(done, f"rerouted {_count(done.rows)} {verb}", output)


@app.command(name="discard")
def discard_(
    route: RouteId,
    /,
    *ids: RowIds,
    consent: Consent | None = None,
    options: DatabaseOptions | None = None,
    output: Output = "text",
) -> int:
    """Give up the rows of a route: they are kept and never sent; rows behind them go out."""
    consent = consent or Consent()
    consent.check()
    rows = row_ids(ids)
    database = (options or DatabaseOptions()).load().settings.database
    schema = database.schema_name
    with session(database, timeout=BULK_TIMEOUT) as connection:
        found = read_route(connection, schema, route)
        if consent.dry_run:
            show_loss(_loss(connection, schema, found, rows))
            return 0
        if not consent.is_given(lambda: _loss(connection, schema, found, rows)):
            return 1
        done = discard(connection, schema, found, rows, by=consent.operator, why=consent.reason)
    return _report(done, f"discarded {_count(done.rows)} of route {route}", output)


@app.command(name="probe")
def probe_(*routes: RouteId, options: DatabaseOptions | None = None) -> int:
    """Ask the running relays to try routes now: those given, or all."""
    database = (options or DatabaseOptions()).load().settings.database
    with session(database) as connection:
        found = [read_route(connection, database.schema_name, route).id for route in routes]
        found = found or [route.id for route in list_routes(connection, database.schema_name)]
        probe(connection, database.schema_name, found)
    say(f"asked for a probe of {len(found)} {'route' if len(found) == 1 else 'routes'}")
    return 0


def _check_allowed(settings: Settings, exchange: str | None) -> None:
    if exchange is None:
        return
    try:
        Router.of(settings).check_exchange(exchange.encode())
    except UnsendableError as error:
        raise UsageError(f"{error}: the relay would park the rows") from None


def _loss(connection: psycopg.Connection, schema: str, route: QuarantinedRoute, rows: list[RowId]) -> Loss:
    number, oldest = count_chosen(connection, schema, route, rows)
    excerpt = [_row(row)[:5] for row in list_chosen(connection, schema, route.id, rows, limit=EXCERPT)]
    return Loss(f"discard {_count(number)} of route {route.id}, {route.address}", oldest, excerpt)


def _report(done: Changed, words: str, output: Output) -> int:
    """Print what was done; 3 when some of the rows meant were left out, 1 when none was changed."""
    if output == "json":
        print_json(done)
    else:
        say(words)
    for reason in done.left_out:
        complain(reason)
    if done.left_out:
        return 3 if done.rows else 1
    return 0


def _count(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _list_row(route: QuarantinedRoute) -> tuple[object, ...]:
    since, by = _utc(route.since), _utc(route.next_probe_by)
    figures = (route.rows, route.behind, since, route.probes, by)
    return (route.id, route.exchange, route.routing_key, *figures, route.reason)


def _row(row: WaitingRow) -> tuple[object, ...]:
    kind = (row.aggregate_type, row.aggregate_id, row.event_type)
    return (row.id, row.message_id, *kind, _utc(row.created_at), row.attempts, row.last_error)


def _utc(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
