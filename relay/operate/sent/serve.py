"""Make a replay job, and run it as a command does: until its end or a signal, with errors in words for an operator."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import psycopg

from relay.config.settings import Settings
from relay.errors import AccessError, DatabaseUnavailableError, OutboxError, leaves
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind, Order, Source, make_job, operator
from relay.operate.sent.run import Progress, Replay, RunEnd
from relay.operate.sent.selection import Selection
from relay.operate.sent.target import SAME, Target, Trace
from relay.runtime.memory import collect_rarely
from relay.runtime.stopping import stopped_by_signals
from relay.servers.postgres.statement_fault import refused_or_lost


class End(NamedTuple):
    """How a run ended: with the job done, paused or told to stop."""

    how: RunEnd
    progress: Progress


def order_replay(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    *,
    by: str | None = None,
    why: str | None = None,
    target: Target = SAME,
    caution: Caution = NO_CAUTION,
    by_console: bool = False,
) -> Job:
    """Write down a job over what has been sent until now; `serve` runs it. `by`: as `operator` takes it."""
    order = Order(
        kind=Kind.REPLAY,
        source=Source.SENT,
        filter=selection.as_json() | ({} if target.trace is Trace.LINK else {"trace": target.trace}),
        by=operator(by),
        why=why,
        to_exchange=target.exchange,
        routing_key=target.routing_key,
        caution=caution,
        by_console=by_console,
    )
    return make_job(connection, schema, order)


async def serve(settings: Settings, job: Job, *, rate: float | None, show: Callable[[Progress], None]) -> End:
    """Run a job until its end, or until SIGTERM or SIGINT; a second signal stops at once, and loses nothing.

    Args:
        rate: messages a second at most, in place of the job's; neither: as many as leave live traffic its pace.
        show: called several times a second.
    Raises:
        BusyError: another process runs it.
        PartlyDoneError: it was cancelled, or too much was refused.
        OutboxError: it could not begin or go on; it can be resumed.
    """
    collect_rarely()
    replay = Replay(settings, job, rate=rate, show=show)
    running = asyncio.create_task(run_in_words(replay), name="replay")

    with stopped_by_signals(lambda _: replay.stop(), running):
        try:
            return End(await running, replay.progress)
        except asyncio.CancelledError:
            return End(RunEnd.STOPPED, replay.progress)


async def run_in_words(replay: Replay) -> RunEnd:
    """Run a job until its end, or until `replay.stop()`; raises as `serve`."""
    try:
        return await replay.run()
    except BaseExceptionGroup as group:
        raise _explained(group) from group
    except psycopg.Error as error:
        raise _in_words(error) from error


def _explained(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that an operator should read: one of ours if there is one."""
    errors = [_in_words(error) for error in leaves(group)]
    return next((error for error in errors if isinstance(error, OutboxError)), errors[0])


def _in_words(error: BaseException) -> BaseException:
    match error:
        case psycopg.errors.InsufficientPrivilege():
            return AccessError(
                f"{error.diag.message_primary}: `relay config roles` prints the grants that a replay needs"
            )
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return DatabaseUnavailableError(refused_or_lost(error))
        case _:
            return error
