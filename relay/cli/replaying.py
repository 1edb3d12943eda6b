"""Run a replay in the foreground, and tell how it ended: for `relay replay` and `relay jobs resume`."""

import time
from functools import partial

import uvloop

from relay.cli.exit_code import ExitCode
from relay.cli.options import Output
from relay.cli.printing import aside, complain, print_json, say
from relay.cli.progress import Seen, shown_progress
from relay.cli.running import how_to_go_on, unfinished
from relay.config.settings import Settings
from relay.errors import BusyError, OutboxError, PartlyDoneError
from relay.jobs.job import Job, read_job
from relay.logger import get_logger
from relay.operate.session import session
from relay.replay.run import Progress
from relay.replay.serve import serve

log = get_logger(__name__)


def run_replay(settings: Settings, job: Job, output: Output) -> ExitCode:
    """Run a replay until its end or a signal, and print what it did."""
    started = time.monotonic()
    try:
        with shown_progress(settings.log, job.name, partial(_tell, job)) as show:
            end = uvloop.run(serve(settings, job, show=lambda told: show(_seen(told))))
    except OutboxError as error:
        if not isinstance(error, BusyError | PartlyDoneError):
            aside(how_to_go_on(job))
        raise
    selected, replayed, failed = end.progress
    if output == "json":
        state = "done" if end.is_done else "paused" if end.is_paused else "interrupted"
        print_json({"id": job.id, "state": state, **end.progress._asdict()})
    elif not end.is_done:
        say(f"replay {job.id} stopped after {replayed + failed} of {selected or 'uncounted'} rows")
    elif not selected:
        say(f"no sent row matches: nothing to replay (replay {job.id})")
    else:
        say(f"replay {job.id} is done: {replayed} rows replayed in {time.monotonic() - started:.1f} s")
    if not end.is_done:
        if end.is_paused:
            with session(settings.database) as connection:
                return unfinished(read_job(connection, settings.database.schema_name, job.id))
        aside(how_to_go_on(job))
        return ExitCode.INTERRUPTED
    if gone := (selected or 0) - replayed - failed:
        complain(f"{gone} rows are gone: their days were dropped before they could be read")
    if failed:
        complain(f"{failed} rows could not be sent: `relay jobs show {job.id}` tells which, and why")
    return ExitCode.FAILED if failed or gone else ExitCode.DONE


def _seen(progress: Progress) -> Seen:
    return Seen(progress.selected, progress.replayed + progress.failed, progress.failed)


def _tell(job: Job, seen: Seen) -> None:
    replayed = seen.done - seen.failed
    log.info("replay.progressed", replay=job.id, selected=seen.total, replayed=replayed, failed=seen.failed)
