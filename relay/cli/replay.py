"""`relay replay`."""

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from relay.cli.consent import Audit
from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import Careful, report_job, run_replay, shown_rows
from relay.cli.operations import RemoteOptions
from relay.cli.options import (
    Flags,
    MessageIds,
    Output,
    check_address,
    check_choice,
)
from relay.cli.printing import aside, print_json, print_table, say
from relay.errors import UsageError
from relay.jobs.job import Caution
from relay.operate import replay as replay_of
from relay.operate.operation import SCAN_TIMEOUT
from relay.operate.replay import ReplayFilter, ReplayPreview, SentRows, left_out
from relay.operate.sent.selection import now
from relay.operate.sent.target import Target as Address
from relay.operate.sent.target import Trace, check_target
from relay.operate.sent.work import order_replay
from relay.operate.session import session


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """Where the rows go, and with which trace."""

    to_exchange: Annotated[str | None, Parameter(help="In place of where they went; '' addresses a queue.")] = None
    routing_key: Annotated[str | None, Parameter(help="In place of theirs; needs --to-exchange.")] = None
    trace: Annotated[
        Trace, Parameter(help="`keep` traceparent, move it into x-link-traceparent (`link`), or `drop` it.")
    ] = Trace.LINK

    def check(self) -> None:
        """Refuse a target that is incomplete, or that AMQP cannot carry.

        Raises:
            UsageError: says which.
        """
        if self.routing_key is not None and self.to_exchange is None:
            raise UsageError("--routing-key needs --to-exchange: rows of one filter may go to several exchanges")
        check_address(self.to_exchange, self.routing_key)

    @property
    def address(self) -> Address:
        return Address(self.to_exchange, self.routing_key, self.trace)


def replay(
    *message_ids: MessageIds,
    options: RemoteOptions = RemoteOptions(),
    filters: Annotated[ReplayFilter, Flags] = ReplayFilter(),
    all_: Annotated[bool, Parameter(name="--all", help="Every sent row; needed when there is no filter.")] = False,
    target: ReplayTarget = ReplayTarget(),
    careful: Careful = Careful(),
    dry_run: Annotated[bool, Parameter(help="Send nothing; print the exact count, by day.")] = False,
    audit: Audit = Audit(),
    output: Output = "text",
) -> ExitCode:
    """Send rows again that were sent before now, in order per key, with their message ids and x-replay-id.

    Ctrl-C stops it, and `relay jobs resume` goes on. Next to live traffic it goes slowly, unless --rate says how fast.
    """
    asked = SentRows.model_construct(message_ids=message_ids, **dict(filters))
    choices = "message ids, a filter such as --aggregate-id or --since, or --all for every sent row"
    check_choice(is_filtered=not asked.is_everything, is_all=all_, choices=choices)
    target.check()
    caution = careful.caution()
    if dry_run:
        return _print_preview(options.operations().do(replay_of.preview, asked), output)
    if options.server:
        return _ask(options, asked, target, caution=caution, audit=audit, output=output)
    settings = options.load().settings
    with session(settings.database, timeout=SCAN_TIMEOUT) as tables:
        selection = asked.selection(now(tables.connection))
        asyncio.run(check_target(settings.broker, target.to_exchange, target.routing_key))
        job = order_replay(
            tables, selection, by=audit.by, why=audit.reason or None, target=target.address, caution=caution
        )
        # Now that the job keeps retention from dropping any day that is still there.
        for line in left_out(tables, selection):
            aside(line)
    return run_replay(settings, job, None, output)


def _ask(
    options: RemoteOptions, asked: SentRows, target: ReplayTarget, *, caution: Caution, audit: Audit, output: Output
) -> ExitCode:
    """Have a console send."""
    ordered = replay_of.OrderReplay.model_construct(
        **dict(asked), **asdict(target), **asdict(caution), all=asked.is_everything, why=audit.reason
    )
    started = time.monotonic()
    with shown_rows(options.log_settings(), "replay") as show:
        _, job = options.operations().finish(replay_of.order, ordered, by=audit.operator, show=show)
    return report_job(job, output, seconds=time.monotonic() - started)


def _print_preview(seen: ReplayPreview, output: Output) -> ExitCode:
    for line in seen.left_out:
        aside(line)
    if output == "json":
        print_json({"rows": seen.rows, "days": seen.days})
    else:
        print_table(("day", "rows"), [(day.day, day.rows) for day in seen.days])
        say(f"would replay {seen.rows} rows")
    return ExitCode.DONE
