"""`relay quarantine`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Audit, Consent, Loss, show_loss
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.job_runs import how_it_ended, shown_rows
from relay.cli.operations import Operations, RemoteDatabaseOptions
from relay.cli.options import DryRun, FailureGroup, Most, Output, Seconds, check_address
from relay.cli.printing import aside, complain, counted, print_json, print_pairs, print_table, say
from relay.errors import UsageError
from relay.observe.printable import utc
from relay.operate.asked import MOST
from relay.operate.messages.whereabouts import row_id, row_ids
from relay.operate.parked.work import ParkedDone
from relay.operate.routes import asked as quarantine
from relay.operate.routes.listed import NOT_LISTED
from relay.operate.routes.quarantine import Changed, ReleasedRoute, RouteStatus, WaitingRow

LIST_COLUMNS = (
    "route", "exchange", "routing key", "rows", "behind", "since", "probes", "next probe by", "reason", "paused by",
    "last probe",
)  # fmt: skip
RELEASED_COLUMNS = ("route", "exchange", "routing key", "since", "probes", "last probe at", "released at", "reason")
LOOK_INTERVAL = 0.5  # seconds between two looks at what came of a probe
ROW_COLUMNS = ("id", "message id", "type", "key", "event", "written at", "attempts", "reason")

app = App(
    name="quarantine", help="See, reroute, discard or try what waits for a route that does not work; pause a route."
)

RouteId = Annotated[int, Parameter(help="Number of the route, as `list` tells it.", validator=validators.Number(gte=1))]
SomeRoute = Annotated[
    int | None,
    Parameter(help="Number of the route, as `list` tells it; or give --group.", validator=validators.Number(gte=1)),
]
RowIds = Annotated[str, Parameter(name="ID", help="Ids or message ids of rows of the route; all of them unless given.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RerouteTarget:
    """Where the rows go from now on."""

    to_exchange: Annotated[str | None, Parameter(help="In place of the route's; '' addresses a queue.")] = None
    routing_key: Annotated[str | None, Parameter(help="In place of the route's.")] = None

    def check(self) -> None:
        """Refuse a target that names nothing, or that AMQP cannot carry.

        Raises:
            UsageError: says which.
        """
        if self.to_exchange is None and self.routing_key is None:
            raise UsageError("give --to-exchange, --routing-key, or both: where the rows go from now on")
        check_address(self.to_exchange, self.routing_key)


@app.command(name="list")
def list_(*, options: RemoteDatabaseOptions = RemoteDatabaseOptions(), output: Output = "text") -> ExitCode:
    """List the routes in quarantine, the oldest first."""
    routes = options.operations().do(quarantine.list_, quarantine.ListRoutes())
    if output == "json":
        print_json(routes)
    else:
        print_table(LIST_COLUMNS, [_list_row(route) for route in routes])
    return ExitCode.DONE


@app.command
def show(
    id_: Annotated[str, Parameter(name="ID", help="Number of the route, or id or message id of a row in quarantine.")],
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """Show a route and the first rows that wait for it."""
    row_id(id_)
    found = options.operations().do(quarantine.show, quarantine.ShowRoute.model_construct(name=id_, limit=limit))
    route, rows = found.route, found.rows
    if output == "json":
        print_json({"route": route, "topology": found.topology, "rows": rows})
        return ExitCode.DONE
    pairs = [(name.replace("_", " "), getattr(route, name)) for name in RouteStatus.__dataclass_fields__]
    print_pairs([*pairs, ("topology", ", ".join(found.topology) or NOT_LISTED)])
    print_table(ROW_COLUMNS, [_row(row) for row in rows])
    if route.rows > len(rows):
        aside(f"{route.rows - len(rows)} more: --limit {route.rows} lists them all")
    return ExitCode.DONE


@app.command
def released(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """List the routes that have left the quarantine lately, the newest first."""
    found = options.operations().do(quarantine.released, quarantine.ListReleased.model_construct(limit=limit))
    if output == "json":
        print_json(found)
    else:
        print_table(RELEASED_COLUMNS, [_released_row(route) for route in found])
    return ExitCode.DONE


@app.command(name="reroute")
def reroute_(
    route: SomeRoute = None,
    /,
    *ids: RowIds,
    target: RerouteTarget = RerouteTarget(),
    group: FailureGroup = None,
    audit: Audit = Audit(),
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send the rows of a route to another exchange or routing key, in order per key; the relay tries it first.

    Rows that only wait behind them keep their addresses, and follow.
    """
    target.check()
    if not dry_run:
        audit.check_reason()
    row_ids(ids)
    operations = options.operations()
    codes = []
    for each in _routes(operations, route, group):
        foreseen = operations.do(quarantine.preview, _rows_of(each, ids, limit=1))
        exchange, key = foreseen.route.rerouted(target.to_exchange, target.routing_key)
        verb = f"to exchange {exchange!r}, routing key {key!r}"
        if dry_run:
            say(f"would reroute {counted(foreseen.rows, 'row')} {verb}")
            continue
        wanted = quarantine.Reroute.model_construct(
            route=each, ids=ids, to_exchange=target.to_exchange, routing_key=target.routing_key, why=audit.reason
        )
        done = operations.do(quarantine.reroute, wanted, by=audit.operator)
        words = f"rerouted {counted(done.rows, 'row')} {verb}"
        codes.append(_report(done, words, output, rows=done.rows, left_out=done.left_out))
    return max(codes, default=ExitCode.DONE)


@app.command(name="discard")
def discard_(
    route: SomeRoute = None,
    /,
    *ids: RowIds,
    group: FailureGroup = None,
    consent: Consent = Consent(),
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    output: Output = "text",
) -> ExitCode:
    """Give up the rows of a route: they are kept and never sent; rows behind them go out."""
    consent.check()
    row_ids(ids)
    operations = options.operations()
    codes = []
    for each in _routes(operations, route, group):
        loss = partial(_loss, operations, each, ids)
        if consent.dry_run:
            show_loss(loss())
        elif not consent.is_given(loss):
            codes.append(ExitCode.FAILED)
        else:
            with shown_rows(options.log_settings(), f"discard of route {each}") as shown:
                wanted = quarantine.ChangeRoute.model_construct(route=each, ids=ids, why=consent.reason)
                ordered, job = operations.finish(quarantine.discard, wanted, by=consent.operator, show=shown)
            done = ParkedDone(job.done, job.released, ordered.not_found, job.id, job.state)
            code = _report(
                done,
                f"discarded {counted(done.chosen, 'row')} of route {each}",
                output,
                rows=done.chosen,
                left_out=done.not_found,
            )
            codes.append(max(code, how_it_ended(job)))
    return max(codes, default=ExitCode.DONE)


@app.command(name="probe")
def probe_(
    *routes: RouteId,
    group: FailureGroup = None,
    wait: Annotated[Seconds, Parameter(help="Wait so long for what comes of it, and print that.")] = 0.0,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
) -> ExitCode:
    """Ask the running relays to try routes now: those given or of the group, or all.

    With --wait it exits with 1 when no route was released, with 3 when some were not.
    """
    operations = options.operations()
    chosen = [*routes, *(_routes(operations, None, group) if group is not None else ())]
    found = operations.do(quarantine.probe, quarantine.Probe.model_construct(routes=tuple(chosen)))
    say(f"asked for a probe of {counted(len(found.routes), 'route')}")
    if not wait:
        return ExitCode.DONE
    left = _wait_for_outcomes(operations, found.routes, wait)
    return exit_code(done=len(found.routes) - left, left=left)


def _wait_for_outcomes(operations: Operations, routes: Sequence[int], seconds: float) -> int:
    """Print what came of the probes of these routes; return how many of them are in quarantine still."""
    until = time.monotonic() + seconds
    while True:
        there = {each.id: each for each in operations.do(quarantine.list_, quarantine.ListRoutes())}
        left = [there[route] for route in routes if route in there]
        if not any(each.last_probe in ("awaited", "under way") for each in left) or time.monotonic() >= until:
            break
        time.sleep(LOOK_INTERVAL)
    lately = quarantine.ListReleased.model_construct(limit=MOST)
    gone = {each.id: each for each in operations.do(quarantine.released, lately)}
    for route in routes:
        words = gone[route].probe_words if route in gone else "released"
        say(f"route {route}: {there[route].probe_words if route in there else words}")
    return len(left)


@app.command(name="pause")
def pause_(
    exchange: Annotated[str, Parameter(help="The exchange that the messages go to; '' addresses a queue.")],
    routing_key: Annotated[str, Parameter(help="Their routing key, as it is sent.")],
    /,
    *,
    audit: Audit = Audit(),
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    output: Output = "text",
) -> ExitCode:
    """Let the messages for an address wait in the table, also if it works; what is in flight is still sent."""
    audit.check_reason()
    wanted = quarantine.PauseRoute.model_construct(exchange=exchange, routing_key=routing_key, why=audit.reason)
    route = options.operations().do(quarantine.pause, wanted, by=audit.operator)
    if output == "json":
        print_json(route)
    else:
        say(f"paused route {route.id}, {route.address}: `relay quarantine resume {route.id}` ends that")
    return ExitCode.DONE


@app.command(name="resume")
def resume_(
    route: RouteId,
    /,
    *,
    audit: Audit = Audit(),
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    output: Output = "text",
) -> ExitCode:
    """Let the relays try a paused route now: its messages go in order when it works."""
    wanted = quarantine.ResumeRoute.model_construct(route=route, why=audit.reason)
    found = options.operations().do(quarantine.resume, wanted, by=audit.operator)
    if output == "json":
        print_json(found)
    else:
        say(f"resumed route {route}, {found.address}")
    return ExitCode.DONE


def _routes(operations: Operations, route: int | None, group: str | None) -> list[int]:
    """Return the number of the route, or those of the group; UsageError unless one of both is given."""
    if (route is None) == (group is None):
        raise UsageError("give the number of a route, or --group: one of both")
    if route is not None:
        return [route]
    return [each.id for each in operations.do(quarantine.list_, quarantine.ListRoutes.model_construct(group=group))]


def _rows_of(route: int, ids: tuple[str, ...], *, limit: int) -> quarantine.PreviewRoute:
    return quarantine.PreviewRoute.model_construct(route=route, ids=ids, limit=limit)


def _loss(operations: Operations, route: int, ids: tuple[str, ...]) -> Loss:
    foreseen = operations.do(quarantine.preview, _rows_of(route, ids, limit=EXCERPT))
    excerpt = [_row(row)[:5] for row in foreseen.first]
    words = f"discard {counted(foreseen.rows, 'row')} of route {route}, {foreseen.route.address}"
    return Loss(words, foreseen.oldest, excerpt)


def _report(done: Changed | ParkedDone, words: str, output: Output, *, rows: int, left_out: Sequence[str]) -> ExitCode:
    """Print what was done, and return the exit code."""
    if output == "json":
        print_json(done)
    else:
        say(words)
    for reason in left_out:
        complain(reason)
    return exit_code(done=rows, left=len(left_out))


def _list_row(route: RouteStatus) -> tuple[object, ...]:
    by = utc(route.next_probe_by) if route.next_probe_by else ""
    figures = (route.rows, route.behind, utc(route.since), route.probes, by)
    probe = route.last_probe if route.last_probe is not None else ""
    return (route.id, route.exchange, route.routing_key, *figures, route.reason, route.paused_by or "", probe)


def _released_row(route: ReleasedRoute) -> tuple[object, ...]:
    probed = utc(route.probed_at) if route.probed_at else ""
    address = (route.id, route.exchange, route.routing_key)
    return (*address, utc(route.since), route.probes, probed, utc(route.released_at), route.reason)


def _row(row: WaitingRow) -> tuple[object, ...]:
    kind = (row.aggregate_type, row.aggregate_id, row.event_type)
    return (row.id, row.message_id, *kind, utc(row.created_at), row.attempts, row.last_error)
