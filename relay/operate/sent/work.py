"""Send again what was sent, as a job: read, send, wait for the confirms, save how far.

list ──places──> read ──rows──> publisher ──frames──> broker        (a connection and a channel of its own)
                                   │ <──confirms────────┘
             save <── ledger <─────┘ settled rows

The publisher is the relay's own, in order per key: nothing of a key is sent before its predecessor is settled. A step
hands rows over, and counts what was settled meanwhile; it does not wait for what it has handed over.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import psycopg

from relay.config.settings import KeyPolicy, Ordering, Settings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.positions import READ_SHARE
from relay.engine.row import Row
from relay.engine.send.broker_link import BrokerLink
from relay.engine.send.message import REPLAY_ID, REPLAYED_AT
from relay.engine.send.sender import Sender
from relay.errors import AccessError, DatabaseUnavailableError, DeadlineError, OutboxError, PartlyDoneError, leaves
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind, Order, Source, make_job, operator
from relay.jobs.work import FULL, Answer, Did, Ended, Pace, Save, StageOutcome, Step, stage_of
from relay.logger import get_logger
from relay.operate.sent.ledger import Ledger
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.session import ReplaySession
from relay.operate.sent.target import SAME, Target, Trace
from relay.runtime.backoff import backoff, wait_for_event
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance
from relay.servers.postgres.statement_fault import refused_or_lost
from relay.servers.postgres.tables import Tables

log = get_logger(__name__)

SAVE_INTERVAL = 0.3  # seconds
LOOK_INTERVAL = 0.1  # seconds between two looks at the live rows
RECONNECT_INITIAL, RECONNECT_MAX = 0.1, 5.0  # seconds
WINDOW_ROWS = 4000  # above the saved position; so many at most are sent twice after a kill
ROWS_PER_READ = 1000
MOST_FAILURES = 1000  # of one run: what refuses so many refuses all

QUIET_AFTER = 1.0  # seconds without a new row, after which nothing is in the way
BESIDE_LIVE = 1000.0  # messages a second next to live traffic


def order_replay(
    tables: Tables,
    selection: SentSelection,
    *,
    by: str | None = None,
    why: str | None = None,
    target: Target = SAME,
    caution: Caution = NO_CAUTION,
    by_console: bool = False,
) -> Job:
    """Write down a job over what has been sent until now; `ReplayWork` does it. `by`: as `operator` takes it."""
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
    return make_job(tables, order)


class LivePace(Pace):
    """Lets live traffic keep its pace: as fast as it can while no application writes, and slowly while one does."""

    def __init__(self) -> None:
        super().__init__(BESIDE_LIVE)
        self._last_id: int | None = None
        self._busy_at = asyncio.get_running_loop().time()

    def see(self, last_id: int, is_pending: bool) -> None:
        """Take note of the live rows: does an application write, or a row wait?"""
        now = asyncio.get_running_loop().time()
        if is_pending or last_id != self._last_id:
            self._busy_at = now
        self._last_id = last_id
        self.limit = FULL if now - self._busy_at > QUIET_AFTER else BESIDE_LIVE


class ReplayWork:
    """A job over sent rows; see `relay.jobs.work.Work`. It waits for a database that went away.

    Args:
        rate: messages a second at most, in place of the job's; neither: as many as leave live traffic its pace.
    """

    most = ROWS_PER_READ
    things, left = "rows", "the others are not"
    doubtful = 0
    may_be_cut = True  # making the list may take minutes

    def __init__(self, settings: Settings, job: Job, *, rate: float | None = None) -> None:
        relay, given = settings.relay, rate or job.rate
        self._settings = settings.model_copy(
            update={
                "relay": relay.model_copy(update={"node": f"replay {job.id}, {relay.node}"}),
                "broker": settings.broker.model_copy(update={"declare": False}),
            }
        )
        self.pace = LivePace() if given is None else Pace(given)
        self._job = job
        self._health = Health()
        self._publisher = Sender(DeliveryPolicy.of(Ordering.KEY, KeyPolicy.SKIP), relay.max_in_flight)
        stamp: dict[str, str | int] = {REPLAY_ID: job.id, REPLAYED_AT: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        self._link = BrokerLink(self._settings, self._publisher, self._health, stamp)
        self._ledger = Ledger(job.position)
        self._save: Save
        self._rows: list[Row] = []  # read, and not handed over
        self._read_to = 0  # the last of them
        self._is_read = False  # there are no more
        self._selected: int | None = None  # as the first run has listed them
        self._is_listed = False
        self._saved_at = 0.0
        self._stage_failed = 0  # rows of the stage, of this run
        self._refused = 0  # rows of this run
        self._reason = ""  # of the last one
        self._session: ReplaySession | None = None
        self._was_connected = False
        self._is_ending = False
        self._database = asyncio.Lock()
        self._changed = asyncio.Event()  # rows were settled

    @property
    def under_way(self) -> int:
        return self._ledger.rows

    @asynccontextmanager
    async def opened(self, save: Save) -> AsyncIterator[None]:
        self._save = save
        try:
            await self._in_session(_nothing)
            self._ledger = Ledger(save.job.position)
            self._read_to = save.job.position
            async with asyncio.TaskGroup() as tasks:
                side = [
                    tasks.create_task(self._link.run(), name="link"),
                    tasks.create_task(self._settle(), name="settle"),
                ]
                if isinstance(self.pace, LivePace):
                    side.append(tasks.create_task(self._look_often(self.pace), name="look"))
                yield
                for task in side:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _explained(group) from group
        except psycopg.Error as error:
            raise _in_words(error) from error
        finally:
            await self._close()

    async def use(self, call: Callable[[psycopg.AsyncConnection], Awaitable[Answer]]) -> Answer:
        return await self._in_session(lambda session: session.call(call))

    async def step(self, room: int, save: Save) -> Step:
        if self._refused >= MOST_FAILURES:
            raise await self._refused_all(save)
        if room:
            await self._hand_over(room)
        if self._is_read and not self._ledger.rows:
            if self._ledger.failures:  # the step that counted them did not save
                await self._write(self._did(), save)
            return Ended()
        did, ledger = self._did(), self._ledger
        is_last = self._is_read and did.done + did.failed == ledger.rows
        if is_last or asyncio.get_running_loop().time() - self._saved_at >= SAVE_INTERVAL:
            await self._write(did, save)
        ledger.take(did.done, did.failed)
        return did

    async def outcome(self, save: Save) -> StageOutcome:
        stage = stage_of(save.job)
        begin = stage.begin if stage else 0
        rows, failing = save.job.tried - begin, self._stage_failed
        words = f"{failing} of {rows} rows of the stage failed"
        outcome = StageOutcome(rows=rows, failing=failing, failed=0, words=words)
        failures = list(self._ledger.failures)
        await self.use(lambda connection: save(connection, outcome, failures=failures))
        self._ledger.saved(failures)
        self._stage_failed = 0
        return outcome

    async def watch(self, _: Save, *, is_last: bool) -> None:
        """The broker has confirmed each row: no more is to come of it."""
        del is_last

    async def settle(self, save: Save) -> Did:
        """Send what was handed over all the same, for what is settled behind a gap would go out twice."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.relay.drain_timeout):
                while self._ledger.is_under_way and self._refused < MOST_FAILURES:
                    if not self._publisher.in_flight and not len(self._publisher.queue.checks):
                        break
                    await self._wait_changed()
        did = self._did()
        await self._write(did, save)
        self._ledger.take(did.done, did.failed)
        return did

    async def _hand_over(self, room: int) -> None:
        """Hand rows over, or wait for some that were."""
        if not self._is_listed:
            await self._list()  # which may take minutes
        most = self._settings.relay.max_window_bytes
        ledger = self._ledger
        is_full = ledger.rows > WINDOW_ROWS - ROWS_PER_READ or ledger.bytes > most * 3 // 4
        if not self._rows and not self._is_read and not is_full:
            size = min(most - ledger.bytes, most // READ_SHARE)
            after = self._read_to
            self._rows = await self._in_session(lambda session: session.next_rows(after, ROWS_PER_READ, size))
            self._is_read = not self._rows
            self._read_to = self._rows[-1].id if self._rows else after
        rows, self._rows = self._rows[:room], self._rows[room:]
        if rows:
            ledger.offer(rows)
            self._publisher.offer(rows)
        elif ledger.is_under_way:
            await wait_for_event(self._changed, SAVE_INTERVAL)
        self._changed.clear()

    async def _list(self) -> None:
        if isinstance(self.pace, LivePace):
            await self._look(self.pace)  # so that the time of the list counts when it looks again
        listed = await self._in_session(lambda session: session.list_rows(self._read_to))
        if self._save.job.selected is None:
            self._selected = listed
        self._is_listed = True
        log.info("replay.listed", replay=self._job.id, rows=listed)

    def _did(self) -> Did:
        ledger = self._ledger
        return Did(done=ledger.replayed, failed=ledger.failed, position=ledger.position, selected=self._selected)

    async def _write(self, did: Did, save: Save) -> None:
        failures = list(self._ledger.failures)
        await self.use(lambda connection: save(connection, did, failures=failures))
        self._ledger.saved(failures)
        self._saved_at = asyncio.get_running_loop().time()

    async def _refused_all(self, save: Save) -> PartlyDoneError:
        await self.settle(save)
        return PartlyDoneError(
            f"replay {self._job.id} stopped: {self._refused} rows were refused, the last with: {self._reason};"
            f" `relay jobs resume {self._job.id}` goes on behind them"
        )

    async def _wait_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _settle(self) -> None:
        while await self._publisher.wait_settled():
            confirmed, faulty = self._publisher.take_settled()
            self._ledger.confirm(confirmed)
            for row, reason, _ in faulty:
                log.warning("replay.row_failed", replay=self._job.id, id=row.id, reason=reason)
                self._ledger.fail(row, reason)
                self._stage_failed += 1
                self._publisher.queue.release_key(row)
                self._refused, self._reason = self._refused + 1, reason
            self._changed.set()

    async def _look_often(self, pace: LivePace) -> None:
        while True:
            await self._look(pace)
            await asyncio.sleep(LOOK_INTERVAL)

    async def _look(self, pace: LivePace) -> None:
        pace.see(*await self._in_session(ReplaySession.look))

    async def _in_session(self, call: Callable[[ReplaySession], Awaitable[Answer]]) -> Answer:
        """Use the session; one that was lost is opened again and asked again, while what was read goes out."""
        failures = 0
        async with self._database:
            while True:
                try:
                    if self._session is None:
                        self._session = await ReplaySession.open(self._settings.database, self._job, self._save)
                        self._was_connected = True
                        self._health.heal("database")
                    return await call(self._session)
                except (
                    psycopg.OperationalError,
                    psycopg.InterfaceError,
                    DatabaseUnavailableError,
                    DeadlineError,
                ) as error:
                    if self._is_ending or not self._is_lost(error):
                        raise
                    self._health.degrade("database", Hindrance(str(error)))
                    await self._close()
                failures += 1
                await asyncio.sleep(backoff(failures, RECONNECT_INITIAL, RECONNECT_MAX))

    def _is_lost(self, error: Exception) -> bool:
        """Return whether a new session may help: there was one before, and the database did not merely refuse."""
        if self._session is None:
            return self._was_connected
        return isinstance(error, DeadlineError) or self._session.is_lost

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


async def _nothing(_: ReplaySession) -> None:
    """Connect."""


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
