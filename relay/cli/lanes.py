"""`relay lanes`."""

from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Audit
from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import Output
from relay.cli.printing import print_json, print_table, say
from relay.observe.printable import utc
from relay.operate import lanes
from relay.operate.asked import Nothing
from relay.operate.lanes import LaneStatus

LIST_COLUMNS = ("lane", "relay", "paused at", "paused by", "why")

app = App(name="lanes", help="See who carries the lanes; pause and resume a lane.")

Lane = Annotated[int, Parameter(help="Its number, from 0 to 15.")]


@app.command(name="list")
def list_(*, options: RemoteDatabaseOptions = RemoteDatabaseOptions(), output: Output = "text") -> ExitCode:
    """List the lanes, by number."""
    found = options.operations().do(lanes.list_, Nothing())
    if output == "json":
        print_json(found)
    else:
        print_table(LIST_COLUMNS, [_row(lane) for lane in found])
    return ExitCode.DONE


@app.command
def pause(
    lane: Lane,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    audit: Audit = Audit(),
    output: Output = "text",
) -> ExitCode:
    """Let no relay carry a lane: its rows stay pending, in order; what is in flight is still sent."""
    audit.check_reason()
    asked = lanes.PauseLane.model_construct(lane=lane, why=audit.reason)
    paused = options.operations().do(lanes.pause, asked, by=audit.operator)
    return _report(paused, f"paused lane {lane}", output)


@app.command
def resume(
    lane: Lane,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    audit: Audit = Audit(),
    output: Output = "text",
) -> ExitCode:
    """Let the relays carry a paused lane again."""
    asked = lanes.ResumeLane.model_construct(lane=lane, why=audit.reason)
    resumed = options.operations().do(lanes.resume, asked, by=audit.operator)
    return _report(resumed, f"resumed lane {lane}", output)


def _report(lane: LaneStatus, words: str, output: Output) -> ExitCode:
    if output == "json":
        print_json(lane)
    else:
        say(words)
    return ExitCode.DONE


def _row(lane: LaneStatus) -> tuple[object, ...]:
    at = utc(lane.paused_at) if lane.paused_at else ""
    return (lane.lane, lane.node or "", at, lane.paused_by or "", lane.paused_why or "")
