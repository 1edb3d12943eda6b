"""The operations, done on the servers of the settings."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from relay.config.settings import Settings
from relay.engine.send.message import UnsendableError
from relay.engine.send.routes import Router
from relay.errors import UsageError
from relay.jobs import job as jobs
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind
from relay.jobs.runner import Show
from relay.operate import batches, pauses, pool
from relay.operate.batches import BatchStatus
from relay.operate.bulk import run, run_letters
from relay.operate.doctor.finding import Finding
from relay.operate.failures import (
    by_weight,
    group_letters,
    list_groups,
    list_held_groups,
    routes_of_group,
    with_retries,
)
from relay.operate.held import retry_held
from relay.operate.letters import work as letters_work
from relay.operate.letters.audit import Entry
from relay.operate.letters.document import document
from relay.operate.letters.letter import Held, Letter
from relay.operate.letters.letter import Selection as LetterSelection
from relay.operate.letters.read import count_letters, list_letters, read_letters, show_letter
from relay.operate.letters.work import order_letters
from relay.operate.messages.whereabouts import RowId
from relay.operate.parked import work as parked
from relay.operate.parked.read import PARKED, ParkedMessage, list_parked, show_parked
from relay.operate.parked.read import Selection as ParkedSelection
from relay.operate.parked.work import Done
from relay.operate.pauses import LaneStatus
from relay.operate.routes import quarantine
from relay.operate.routes.quarantine import Changed, RouteStatus
from relay.operate.routes.work import order_discard
from relay.operate.sent.selection import Filter, count_by_day, now
from relay.operate.sent.target import Target, check_target
from relay.operate.sent.work import order_replay
from relay.operate.session import session
from relay.operate.status import Node, Status, list_nodes, read_status
from relay.operations.left_out import left_out
from relay.operations.results import (
    Failures,
    ListedLetters,
    Ordered,
    ParkedRows,
    ReplayPreview,
    RoutePreview,
    SeenLetters,
    ShownJob,
    ShownRoute,
)
from relay.servers.postgres.database import refuse_pooler

BULK_TIMEOUT = 600.0  # seconds for a statement: one head may have a million rows behind it
SCAN_TIMEOUT = 3600.0  # seconds for a statement: days of sent rows are read from end to end
FIRST_PART = 1000  # characters of a payload, unless all of it is wanted

Connect = Callable[[float | None], AbstractContextManager[psycopg.Connection]]


class LocalOperations:
    """See `relay.operations.operations.Operations`.

    Args:
        connect: yields a session, whose statements may take so many seconds; that of the settings unless given.
        file: the relay.toml that was read, for the doctor.
    """

    def __init__(self, settings: Settings, file: Path | None = None, *, connect: Connect | None = None) -> None:
        self._settings = settings
        self._file = file
        self._schema = settings.database.schema_name
        self._connect: Connect = connect or (lambda timeout: session(settings.database, timeout=timeout))

    def status(self) -> Status:
        with self._connect(None) as connection:
            return read_status(connection, self._schema, progress_timeout=3 * self._settings.relay.heartbeat_interval)

    def nodes(self) -> list[Node]:
        with self._connect(None) as connection:
            return list_nodes(connection, self._schema)

    def doctor(self) -> list[Finding]:
        from relay.operate.doctor.run import examine  # noqa: PLC0415  (few commands need the broker's library)

        return examine(self._settings, self._file)

    def pools(self, names: Sequence[str]) -> pool.PoolsStatus:
        with self._connect(None):  # which finds the tables missing or behind
            return asyncio.run(pool.read_status(self._settings, names=names))

    def list_failures(
        self, queues: Sequence[str], *, with_held: bool, group: str | None = None, limit: int | None = None
    ) -> Failures:
        warnings: list[str] = []
        with self._connect(None) as connection:
            groups = list_groups(connection, self._schema)
            for queue in queues:
                _, dead = letters_work.queues_of(queue)
                letters: list[Letter] = []
                read = asyncio.run(read_letters(self._settings.broker, dead, LetterSelection(), _append_to(letters)))
                groups += with_retries(connection, self._schema, group_letters(letters, dead))
                warnings += [read.warning] if read.warning else []
            if with_held:
                groups += list_held_groups(connection, self._schema)
        chosen = by_weight(each for each in groups if group is None or each.id == group)
        return Failures(chosen[:limit], len(chosen), warnings)

    def list_parked(
        self, selection: ParkedSelection, *, with_held: bool, state: str = PARKED, after: int = 0
    ) -> ParkedRows:
        with self._connect(None) as connection:
            rows, total = list_parked(
                connection, self._schema, selection, with_held=with_held, state=state, after=after
            )
        return ParkedRows(rows, total)

    def show_parked(self, row: RowId, *, is_full: bool) -> ParkedMessage:
        with self._connect(None) as connection:
            return show_parked(connection, self._schema, row, length=2**31 - 1 if is_full else FIRST_PART)

    def preview_parked(self, kind: Kind, selection: ParkedSelection) -> Done:
        with self._connect(BULK_TIMEOUT) as connection:
            return parked.preview(connection, self._schema, kind, selection)

    def change_parked(
        self,
        kind: Kind,
        selection: ParkedSelection,
        *,
        by: str,
        why: str | None,
        caution: Caution = NO_CAUTION,
        show: Show = lambda _: None,
    ) -> Done:
        asyncio.run(refuse_pooler(self._settings.database))  # its lock tells who runs the job
        with self._connect(BULK_TIMEOUT) as connection:
            not_found = parked.rows_not_found(connection, self._schema, kind, selection)
            job = parked.order_rows(connection, self._schema, kind, selection, by=by, why=why, caution=caution)
        show(job)
        job = run(self._settings, job, show=show)
        return Done(job.done, job.released, not_found, job.id, job.state)

    def order_parked(
        self, kind: Kind, selection: ParkedSelection, *, by: str, why: str | None, caution: Caution
    ) -> Ordered:
        """Write down a job that the consoles run."""
        with self._connect(BULK_TIMEOUT) as connection:
            not_found = parked.rows_not_found(connection, self._schema, kind, selection)
            job = parked.order_rows(
                connection, self._schema, kind, selection, by=by, why=why, caution=caution, by_console=True
            )
        return Ordered(job, not_found)

    def list_letters(self, queue: str, selection: LetterSelection) -> ListedLetters:
        letters, read = asyncio.run(list_letters(self._settings.broker, queue, selection))
        return ListedLetters(queue, letters, read)

    def look_at_letters(self, queue: str, selection: LetterSelection, *, first: int) -> SeenLetters:
        letters: list[Letter] = []
        failed: list[datetime] = []  # the earliest alone: a queue may have a million letters

        def note(held: Held) -> None:
            letter = held.letter
            if len(letters) < first:
                letters.append(letter)
            if letter.last_failed_at is not None:
                failed[:] = [min([letter.last_failed_at, *failed])]

        read = asyncio.run(read_letters(self._settings.broker, queue, selection, note))
        return SeenLetters(read, failed[0] if failed else None, letters)

    def show_letter(self, queue: str, message_id: str) -> dict[str, Any]:
        return document(asyncio.run(show_letter(self._settings.broker, queue, message_id)))

    def preview_letters(self, entry: Entry, selection: LetterSelection) -> letters_work.Done:
        return asyncio.run(letters_work.preview_letters(self._settings.broker, entry, selection))

    def change_letters(
        self,
        entry: Entry,
        selection: LetterSelection,
        *,
        caution: Caution = NO_CAUTION,
        show: letters_work.Show = lambda *_: None,
    ) -> letters_work.Done:
        asyncio.run(refuse_pooler(self._settings.database))  # its lock tells who runs the job
        with self._connect(None) as connection:
            job = order_letters(connection, self._schema, entry, selection, caution=caution)
        return run_letters(self._settings, job, show=show)

    def order_letters(self, entry: Entry, selection: LetterSelection, *, caution: Caution) -> Job:
        """Write down a job that the consoles run."""
        asyncio.run(count_letters(self._settings.broker, entry.queue))  # which finds no such queue
        with self._connect(None) as connection:
            return order_letters(connection, self._schema, entry, selection, caution=caution, by_console=True)

    def retry_held(self, group: str | None, *, by: str, why: str) -> int:
        with self._connect(BULK_TIMEOUT) as connection:
            return retry_held(connection, self._schema, group, by=by, why=why)

    def list_routes(self, *, group: str | None = None) -> list[RouteStatus]:
        with self._connect(None) as connection:
            if group is not None:
                return routes_of_group(connection, self._schema, group)
            return quarantine.list_routes(connection, self._schema)

    def show_route(self, named: RowId, *, limit: int, after: int = 0) -> ShownRoute:
        with self._connect(None) as connection:
            route = quarantine.route_of(connection, self._schema, named)
            return ShownRoute(route, quarantine.list_rows(connection, self._schema, route.id, limit=limit, after=after))

    def preview_route(self, route: int, rows: Sequence[RowId], *, limit: int) -> RoutePreview:
        with self._connect(BULK_TIMEOUT) as connection:
            found = quarantine.read_route(connection, self._schema, route)
            number, oldest = quarantine.count_chosen(connection, self._schema, found, rows)
            first = quarantine.list_chosen(connection, self._schema, route, rows, limit=limit)
        return RoutePreview(found, number, oldest, first)

    def reroute(
        self, route: int, rows: Sequence[RowId], *, to_exchange: str | None, routing_key: str | None, by: str, why: str
    ) -> Changed:
        check_reroute(self._settings, to_exchange)
        with self._connect(BULK_TIMEOUT) as connection:
            found = quarantine.read_route(connection, self._schema, route)
            exchange, key = found.rerouted(to_exchange, routing_key)
            return quarantine.reroute(
                connection, self._schema, found, rows, exchange=exchange, routing_key=key, by=by, why=why
            )

    def discard_route(
        self, route: int, rows: Sequence[RowId], *, by: str, why: str, show: Show = lambda _: None
    ) -> Done:
        asyncio.run(refuse_pooler(self._settings.database))  # its lock tells who runs the job
        with self._connect(BULK_TIMEOUT) as connection:
            ordered = self._order_discard(connection, route, rows, by=by, why=why, by_console=False)
        show(ordered.job)
        job = run(self._settings, ordered.job, show=show)
        return Done(job.done, job.released, ordered.not_found, job.id, job.state)

    def order_discard(self, route: int, rows: Sequence[RowId], *, by: str, why: str) -> Ordered:
        """Write down a job that the consoles run."""
        with self._connect(BULK_TIMEOUT) as connection:
            return self._order_discard(connection, route, rows, by=by, why=why, by_console=True)

    def _order_discard(
        self, connection: psycopg.Connection, route: int, rows: Sequence[RowId], *, by: str, why: str, by_console: bool
    ) -> Ordered:
        found = quarantine.read_route(connection, self._schema, route)
        not_found = quarantine.not_chosen(connection, self._schema, route, rows)
        job = order_discard(connection, self._schema, found, rows, by=by, why=why, by_console=by_console)
        return Ordered(job, not_found)

    def probe(self, routes: Sequence[int]) -> list[int]:
        with self._connect(None) as connection:
            named = [quarantine.read_route(connection, self._schema, route) for route in routes]
            if paused := [str(each.id) for each in named if each.paused_at is not None]:
                raise UsageError(f"paused, so not tried: route {', '.join(paused)}; `relay quarantine resume` tries it")
            every = named or quarantine.list_routes(connection, self._schema)
            found = [each.id for each in every if each.paused_at is None]
            quarantine.probe(connection, self._schema, found)
        return found

    def pause_route(self, exchange: str, routing_key: str, *, by: str, why: str) -> RouteStatus:
        with self._connect(None) as connection:
            return pauses.pause_route(connection, self._schema, exchange, routing_key, by=by, why=why)

    def resume_route(self, route: int, *, by: str, why: str | None) -> RouteStatus:
        with self._connect(None) as connection:
            return pauses.resume_route(connection, self._schema, route, by=by, why=why)

    def list_lanes(self) -> list[LaneStatus]:
        with self._connect(None) as connection:
            return pauses.list_lanes(connection, self._schema)

    def pause_lane(self, lane: int, *, by: str, why: str) -> LaneStatus:
        with self._connect(None) as connection:
            return pauses.pause_lane(connection, self._schema, lane, by=by, why=why)

    def resume_lane(self, lane: int, *, by: str, why: str | None) -> LaneStatus:
        with self._connect(None) as connection:
            return pauses.resume_lane(connection, self._schema, lane, by=by, why=why)

    def list_batches(self, *, limit: int) -> list[BatchStatus]:
        with self._connect(None) as connection:
            return batches.list_batches(connection, self._schema, limit=limit)

    def show_batch(self, app_id: str, version: int) -> BatchStatus:
        with self._connect(None) as connection:
            return batches.read_batch(connection, self._schema, app_id, version)

    def give_up_batch(self, app_id: str, version: int, *, by: str, why: str) -> BatchStatus:
        with self._connect(None) as connection:
            return batches.give_up(connection, self._schema, app_id, version, by=by, why=why)

    def preview_replay(self, asked: Filter) -> ReplayPreview:
        with self._connect(SCAN_TIMEOUT) as connection:
            selection = asked.selection(now(connection))
            days = count_by_day(connection, self._schema, selection)
            lines = left_out(connection, self._schema, selection)
        return ReplayPreview(sum(day.rows for day in days), days, lines)

    def order_replay(
        self, asked: Filter, target: Target, *, by: str, why: str | None, caution: Caution = NO_CAUTION
    ) -> Job:
        """Write down a replay that the consoles run."""
        asyncio.run(check_target(self._settings.broker, target.exchange, target.routing_key))
        with self._connect(SCAN_TIMEOUT) as connection:
            return order_replay(
                connection,
                self._schema,
                asked.selection(now(connection)),
                by=by,
                why=why,
                target=target,
                caution=caution,
                by_console=True,
            )

    def list_jobs(self, *, limit: int, kind: Kind | None, before: int | None = None) -> list[Job]:
        with self._connect(None) as connection:
            return jobs.list_jobs(connection, self._schema, limit=limit, kind=kind, before=before)

    def show_job(self, job: int, *, limit: int, after: int = 0) -> ShownJob:
        with self._connect(None) as connection:
            found = jobs.read_job(connection, self._schema, job)
            return ShownJob(found, jobs.list_failures(connection, self._schema, job, limit=limit, after=after))

    def pause_job(self, job: int, *, by: str, why: str | None) -> Job:
        with self._connect(None) as connection:
            return jobs.pause_job(connection, self._schema, job, by=by, why=why)

    def resume_job(self, job: int, *, by: str, why: str | None) -> Job:
        """Let a job go on that a console runs."""
        with self._connect(None) as connection:
            return jobs.resume_job(connection, self._schema, job, by=by, why=why)

    def cancel_job(self, job: int, *, by: str, why: str) -> Job:
        with self._connect(None) as connection:
            jobs.cancellable(jobs.read_job(connection, self._schema, job))
            return jobs.cancel_job(connection, self._schema, job, by=by, why=why)


def _append_to(letters: list[Letter]) -> Callable[[Held], None]:
    return lambda held: letters.append(held.letter)


def check_reroute(settings: Settings, exchange: str | None) -> None:
    """Refuse an exchange that rows may not name.

    Raises:
        UsageError: the relay would park them.
    """
    if exchange is None:
        return
    try:
        Router.of(settings).check_exchange(exchange.encode())
    except UnsendableError as error:
        raise UsageError(f"{error}: the relay would park the rows") from None
