"""What lives as long as the console's process, and is shared by all requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse

from relay.config.settings import Settings
from relay.console.access.access import Access
from relay.console.access.identity import Identity, RefusedError
from relay.console.background import Background
from relay.console.checkup import Checkup
from relay.console.consumers import Consumers
from relay.console.database import INBOX_URL, Database, inbox_of
from relay.console.failure_groups import FailureGroups
from relay.console.history import CurveHistory
from relay.console.live import Live, failed_messages
from relay.console.looks import Looks
from relay.console.place import Location, place_of
from relay.console.repeats import Repeatable
from relay.console.runner import Runner
from relay.console.sampler import Sampler
from relay.console.verdict import TheVerdict, verdict
from relay.console.webhook import Webhook
from relay.jobs.job import Job, Source
from relay.operate.asked import MAX_ID
from relay.operate.failures import Group, ListFailures
from relay.operate.failures import list_ as list_failures
from relay.operate.jobs import job_of
from relay.operate.letters.work import QUEUE
from relay.operate.operation import Asked, Effect, Given, Operation, Role, Servers
from relay.operate.routes.map import RouteMap, read_route_map
from relay.probes.cached_answer import CachedAnswer

JOBS = "jobs."  # operations on jobs
NOBODY = Identity("", Role.VIEWER)  # what the console looks at by itself is noted nowhere
LOOK_PATIENCE = 1.5  # seconds for a connection, until a look says that the database does not answer
ROUTE_MAP_PATIENCE = 0.2  # seconds that a page waits for the broker; then it shows what was seen before


class Site:
    """The parts of one console.

    Attributes:
        access: how it finds out who asks.
        database: the sessions of the outbox.
        inbox: the sessions of the consumers' inbox; often the same.
        alone: held by a look that takes many connections.

    Args:
        file: the relay.toml that was read, for the doctor.
    """

    def __init__(self, settings: Settings, file: Path | None = None) -> None:
        self.settings = settings
        self._file = file
        self.access = Access(settings.console)
        self.database = Database(settings.database, settings.console)
        apart = inbox_of(settings)
        self.inbox = Database(apart, settings.console, url=INBOX_URL) if apart else self.database
        self.alone = asyncio.Lock()
        self.background = Background()
        self.consumers = Consumers(settings, self.database, self.inbox)
        # Its own connection: else it would take a wait for other users' looks for a database that does not answer.
        self._looking = Database(settings.database, settings.console, most=1, patience=LOOK_PATIENCE)
        self.sampler = Sampler(settings, self._looking, self.consumers.in_queues)
        self.history = CurveHistory(settings, self.database, self.sampler)
        self.checkup = Checkup(settings, file)
        self.looks = Looks(settings.broker)
        self.runner = Runner(settings, partial(self.background.note, "jobs"), self._job_left)
        self.webhook = Webhook(settings.console, self._look, self.place)
        self.live = Live(
            self.sampler,
            self.checkup,
            self.consumers,
            self.background,
            unsent=self.webhook.failing,
            base=settings.console.base,
        )
        self.failure_groups = FailureGroups(self._all_failures)
        self.route_map: CachedAnswer[RouteMap] = CachedAnswer(
            lambda: read_route_map(settings), patience=ROUTE_MAP_PATIENCE
        )

    def place(self) -> Location:
        """Return where the operator is, as the URLs say it now."""
        return place_of(self.settings)

    def mood(self) -> str:
        """Return how the outbox is."""
        return self.live.verdict().mood

    def servers(self, who: Identity) -> Servers:
        """Return where an operation is done for a user: on the console's connections.

        Statements end after console.statement_timeout, whatever the operation would allow.
        """
        return Servers(
            self.settings,
            lambda _: self.database.session(),
            file=self._file,
            by=who.name,
            by_console=True,
            require=who.require,
        )

    def do(self, operation: Operation[Asked, Given], asked: Asked, who: Identity) -> Given:
        """Do an operation for a page, and let the console look for a job that was ordered.

        Raises:
            RefusedError: the user's role does not allow it.
            OutboxError: as the operation; nothing was done.
        """
        who.require(operation.role)
        given = operation.does(self.servers(who), asked)
        self._wake(operation)
        return given

    @property
    def paused_jobs(self) -> int:
        """How many jobs wait for an operator, as the latest look saw."""
        return self.sampler.paused_jobs

    @property
    def failed_messages(self) -> int:
        """How many messages have failed, as the latest looks saw."""
        return failed_messages(self.sampler.latest, self.consumers.latest)

    def _job_left(self, job: Job) -> None:
        """See again what a job has changed that does not run any more."""
        self.sampler.wake()
        self.failure_groups.note_change()
        queue = str(job.filter.get(QUEUE))
        if job.source is Source.DEAD_LETTER and queue in self.looks.latest:
            self.looks.begin(queue)

    def change(
        self,
        operation: Operation[Asked, Given],
        asked: Asked,
        who: Identity,
        once: Repeatable | None,
        *,
        check: Callable[[Given], None] = lambda _: None,
    ) -> None:
        """Do an operation that changes the database alone, once, however often its form comes.

        Args:
            check: looks at what was done; when it raises, nothing was.

        Raises:
            RefusedError: the user's role does not allow it; or the form has done something else before.
            OutboxError: as the operation or `check`; nothing was done.
        """

        def note(given: Given) -> str:
            check(given)
            return ""

        self._do_once(operation, asked, who, once, note=note)

    def order(
        self, operation: Operation[Asked, Given], asked: Asked, who: Identity, once: Repeatable | None
    ) -> RedirectResponse:
        """Do an operation that orders a job, and return the way to the job's page; raises as `change`.

        A form that comes twice is answered by the page of the job that it made the first time.
        """
        job = self._do_once(operation, asked, who, once, note=lambda given: str(job_of(given).id))
        return RedirectResponse(f"/jobs/{job}", HTTPStatus.SEE_OTHER)

    def _do_once(
        self,
        operation: Operation[Asked, Given],
        asked: Asked,
        who: Identity,
        once: Repeatable | None,
        *,
        note: Callable[[Given], str],
    ) -> str:
        """Return the note of what was given, now or to an earlier form that was the same."""
        who.require(operation.role)
        servers = self.servers(who)
        with self.database.session() as tables, tables.transaction():
            kept = once.claim(tables, who.name) if once else None
            if kept is None:
                noted = note(operation.does(replace(servers, connect=lambda _: nullcontext(tables)), asked))
                if once:
                    once.keep(tables, who.name, status=HTTPStatus.SEE_OTHER, body=noted.encode())
            else:
                noted = kept.body.decode()
        if kept and not kept.is_same:
            done = f"has made job {noted}" if noted else "was sent"
            words = f"this form {done} before it was changed: send it again, if that is still wanted"
            raise RefusedError(HTTPStatus.CONFLICT, words)
        self._wake(operation)
        return noted

    def _wake(self, operation: Operation[Asked, Given]) -> None:
        """Let the console look for a job that was ordered, and at what was done to one."""
        if operation.effect in (Effect.ORDERED, Effect.RESUMED):
            self.runner.wake()
        if operation.name.startswith(JOBS):
            self.sampler.wake()

    def _all_failures(self) -> Sequence[Group]:
        everything = ListFailures(held=True, limit=MAX_ID)
        return list_failures.does(self.servers(NOBODY), everything).groups

    def _look(self) -> tuple[TheVerdict, int]:
        """Return the verdict but for what the webhook itself adds, and the number of the look that it rests on."""
        sample = self.sampler.latest
        found = verdict(sample, self.checkup.latest, self.consumers.latest, self.background.failing())
        return found, sample.number if sample else 0

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Look at the servers, and run jobs, as long as the app answers."""
        databases = {self.database, self.inbox, self._looking}
        for each in databases:
            each.open()
        looking: dict[str, Callable[[], Awaitable[None]]] = {
            "sampler": self.sampler.run,
            "history": self.history.run,
            "checkup": self.checkup.run,
            "consumers": self.consumers.run,
            "looks": self.looks.run,
            "webhook": self.webhook.run,
        }
        tasks = [asyncio.create_task(self.background.keep(name, run), name=name) for name, run in looking.items()]
        jobs = asyncio.create_task(self.background.keep("jobs", self.runner.run), name="jobs")
        try:
            yield
        finally:
            self.runner.stop()
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, jobs])
            await self.route_map.close()
            await self.failure_groups.close()
            for each in databases:
                each.close()


def site_of(request: Request) -> Site:
    """Return the console that got the request."""
    site: Site = request.app.state.site
    return site
