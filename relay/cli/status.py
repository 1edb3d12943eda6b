"""`relay status`."""

import time
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter, validators
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from relay.cli.exit_code import ExitCode
from relay.cli.operations import Operations, RemoteDatabaseOptions
from relay.cli.options import Output, Seconds
from relay.cli.printing import Row, complain, print_json, print_lines, table
from relay.errors import DatabaseUnavailableError
from relay.observe.printable import printable
from relay.operate import status as status_of
from relay.operate.asked import Nothing
from relay.operate.health import OutboxState
from relay.operate.status import NodeStatus, Status, lane_ranges

COLOURS = {OutboxState.OK: "green", OutboxState.DEGRADED: "yellow", OutboxState.STALLED: "red"}
NODE_COLUMNS = ("relay", "state", "lanes", "in flight", "published", "heartbeat", "version")


def status(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    watch: Annotated[bool, Parameter(name=["--watch", "-w"], help="Go on until Ctrl-C.")] = False,
    interval: Annotated[Seconds, Parameter(help="Time between two looks.", validator=validators.Number(gte=0.1))] = 2.0,
    output: Output = "text",
) -> ExitCode:
    """Show the backlog, the parked rows and the relays. Exits with 0 whatever the state is."""
    operations = options.operations()
    console = Console()
    if not watch:
        _print(operations.do(status_of.status, Nothing()), console, output)
    elif console.is_terminal and output == "text":
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for seen in _looks(operations, interval):
                drawn = _drawn(seen) if isinstance(seen, Status) else Text(f"relay: {printable(str(seen))}")
                live.update(drawn, refresh=True)
    else:
        for seen in _looks(operations, interval):
            if isinstance(seen, Status):
                _print(seen, console, output)
            else:
                complain(str(seen))
    return ExitCode.DONE


def _looks(operations: Operations, interval: float) -> Iterator[Status | DatabaseUnavailableError]:
    """Yield a status each `interval` seconds; after the first, the error while the database is unreachable."""
    yield operations.do(status_of.status, Nothing())
    while True:
        time.sleep(interval)
        try:
            yield operations.do(status_of.status, Nothing())
        except DatabaseUnavailableError as error:
            yield error


def _print(seen: Status, console: Console, output: Output) -> None:
    if output == "json":
        print_json(seen)
    elif console.is_terminal:
        console.print(_drawn(seen))
    else:
        print_lines([("state", seen.state), *(("reason", reason) for reason in seen.reasons), *_figures(seen)])
        print_lines([("node", *_node_row(node)) for node in seen.nodes])


def _drawn(seen: Status) -> RenderableType:
    parts: list[RenderableType] = [Text(seen.state, style=f"bold {COLOURS[seen.state]}")]
    parts += [Text(f"  {printable(reason)}") for reason in seen.reasons]
    age = seen.oldest_pending_age_s
    waited = "" if age is None else f"   the oldest has waited {age:.1f} s"
    held = f"   {seen.parked_held:,} of them held behind others" if seen.parked_held else ""
    parts += [
        Text(""),
        Text(f"pending      {seen.pending:>12,}{waited}"),
        Text(f"in flight    {seen.in_flight:>12,}"),
        Text(f"parked       {seen.parked:>12,}{held}"),
        Text(f"quarantined  {seen.quarantined:>12,}"),
        Text(f"published    {seen.published_total:>12,}"),
    ]
    if seen.nodes:
        parts += [Text(""), table(NODE_COLUMNS, [_node_row(node) for node in seen.nodes])]
    return Group(*parts)


def _figures(seen: Status) -> list[tuple[str, str]]:
    age = "" if seen.oldest_pending_age_s is None else f"{seen.oldest_pending_age_s:.1f}"
    return [
        ("pending", str(seen.pending)),
        ("oldest_pending_age_s", age),
        ("in_flight", str(seen.in_flight)),
        ("parked", str(seen.parked)),
        ("parked_held", str(seen.parked_held)),
        ("quarantined", str(seen.quarantined)),
        ("published_total", str(seen.published_total)),
    ]


def _node_row(node: NodeStatus) -> Row:
    return (
        node.name,
        _state(node),
        lane_ranges(node.lanes),
        node.in_flight,
        node.published_total,
        f"{node.heartbeat_age_s:.0f} s ago",
        node.version,
    )


def _state(node: NodeStatus) -> str:
    if not node.alive:
        return "gone"
    return f"{node.state}, standby" if node.standby else node.state
