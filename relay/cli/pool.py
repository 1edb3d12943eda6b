"""`relay pool`."""

import asyncio
import os
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console, Group, RenderableType
from rich.text import Text

from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteOptions
from relay.cli.options import DatabaseOptions, Output
from relay.cli.printing import Row, print_json, print_lines, table
from relay.consume.pool.candidate import Candidate
from relay.observe import log
from relay.observe.printable import printable, utc
from relay.operate.pool import MemberStatus, PartitionStatus, PoolsStatus, PoolStatus, ShowPools
from relay.operate.pool import pools as show_pools
from relay.operate.session import session
from relay.runtime.stopping import stopped_by_signals

MEMBER_COLUMNS = ("member", "partitions", "in hand", "last check-in", "")
PARTITION_COLUMNS = ("partition", "epoch", "member", "wanted by", "since", "ready")

app = App(name="pool", help="Share partitions among consumers; tell who holds which.")


@app.command
def run(*, options: DatabaseOptions = DatabaseOptions()) -> ExitCode:
    """Be a candidate for the master of the pools, without relaying, until SIGTERM or Ctrl-C; then exit with 0.

    At SIGHUP it reads the file again from which database.url comes.
    """
    settings = options.load().settings
    log.set_up(settings.log)
    with session(settings.database):  # tables and login are looked at once, with a remedy in the error
        candidate = Candidate(settings.database, f"{settings.relay.node} ({os.getpid()})")
    return asyncio.run(_run(candidate))


@app.command
def status(
    pools: Annotated[list[str] | None, Parameter(help="The pools; all unless given.")] = None,
    /,
    *,
    options: RemoteOptions = RemoteOptions(),
    output: Output = "text",
) -> ExitCode:
    """Show the members of each pool, and the holder, the epoch and the lag of each partition."""
    seen = options.operations().do(show_pools, ShowPools.model_construct(pool=tuple(pools or ())))
    console = Console()
    if output == "json":
        print_json(seen)
    elif console.is_terminal:
        console.print(_drawn(seen))
    else:
        _print(seen)
    return ExitCode.DONE


async def _run(candidate: Candidate) -> ExitCode:
    running = asyncio.create_task(candidate.run(), name="pool")
    with stopped_by_signals(lambda _: candidate.stopping.set(), running, reload=candidate.reload):
        try:
            await running
        except asyncio.CancelledError:
            return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _drawn(seen: PoolsStatus) -> RenderableType:
    parts: list[RenderableType] = [Text(f"master  {printable(seen.master or 'none')}", style="bold")]
    parts += [Text(f"  {printable(reason)}", style="yellow") for reason in seen.reasons]
    for pool in seen.pools:
        parts += [Text(""), Text(f"{printable(pool.name)}   queue {printable(pool.queue)}", style="bold")]
        parts.append(Text(f"dead letters {_number(pool.dead_letters)}   waiting {_number(_waiting(pool))}"))
        parts.append(table(MEMBER_COLUMNS, [_member_row(each) for each in pool.members]))
        parts.append(table(PARTITION_COLUMNS, [_partition_row(each) for each in pool.partitions]))
    return Group(*parts)


def _print(seen: PoolsStatus) -> None:
    print_lines([("master", seen.master or "none"), *(("reason", reason) for reason in seen.reasons)])
    for pool in seen.pools:
        print_lines([("pool", pool.name, pool.queue, _number(_waiting(pool)), _number(pool.dead_letters))])
        print_lines([("member", pool.name, *_member_row(each)) for each in pool.members])
        print_lines([("partition", pool.name, *_partition_row(each)) for each in pool.partitions])


def _waiting(pool: PoolStatus) -> int | None:
    counts = [each.ready for each in pool.partitions if each.ready is not None]
    return sum(counts) if len(counts) == len(pool.partitions) else None


def _member_row(member: MemberStatus) -> Row:
    held = ",".join(map(str, member.partitions)) or "-"
    standing = "late" if member.late else "leaving" if member.leaving else ""
    return (member.name, held, f"{member.unacknowledged:,}", f"{member.check_in_age_s:.1f} s ago", standing)


def _partition_row(each: PartitionStatus) -> Row:
    return (
        str(each.partition),
        str(each.epoch),
        each.member or "-",
        each.wanted_by or "",
        utc(each.since),
        _number(each.ready),
    )


def _number(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
