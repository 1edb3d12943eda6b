"""Every work, each with things to do and a way to see what it has done."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import psycopg

from relay.config.settings import Settings
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind, Order, Source, make_job, read_job
from relay.jobs.work import Work
from relay.operate.bulk import work_of
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.work import order_letters
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import order_rows
from relay.operate.routes.quarantine import list_routes
from relay.operate.routes.work import order_discard
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.work import order_replay
from relay.servers.postgres.tables import Tables
from tests.dead_letters.changes import RETRY
from tests.dead_letters.letters import Letters
from tests.jobs.toy import FILL, MAKE, ToyWork
from tests.operate.rows import Rows
from tests.replay.sent import Copies, SentRows, ids_of

ROWS = 24
BATCH = 2
NOTED = """
    SELECT count(*), count(DISTINCT target) FROM outbox.operator_audit WHERE job = %s AND command NOT LIKE 'jobs %%'
"""
NOTED_LETTERS = "SELECT count(*), count(DISTINCT message_id) FROM outbox.dead_letter_audit WHERE job = %s"


class Bench(Protocol):
    """One work.

    Attributes:
        stride: a run is killed at each so many statements; each run costs a connection to a broker.
    """

    stride: int

    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        """Make the rows and a job over them."""

    def work(self, job: Job) -> Work: ...

    async def check(self, connection: psycopg.Connection, /, job: Job) -> None:
        """See that what was done is what the job counts, each row once."""


class RowsBench:
    """Works in a transaction: what is in the audit is what was done."""

    stride = 1

    def __init__(self, settings: Settings, rows: Rows) -> None:
        self._settings = settings
        self._rows = rows

    def work(self, job: Job) -> Work:
        work = work_of(self._settings, job)
        work.most = BATCH
        return work

    async def check(self, connection: psycopg.Connection, job: Job) -> None:
        assert connection.execute(NOTED, [job.id]).fetchone() == (job.done, job.done)


class ParkedBench(RowsBench):
    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        for number in range(ROWS):
            self._rows.parked(str(number))
        return order_rows(
            Tables(connection, "outbox"), Kind.RETRY, ParkedSelection(), by="ada", why="a test", caution=caution
        )


class RouteBench(RowsBench):
    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        for number in range(ROWS):
            self._rows.quarantined("gone", str(number))
        (route,) = list_routes(Tables(connection, "outbox"))
        job = order_discard(Tables(connection, "outbox"), route, [], by="ada", why="a test")
        connection.execute("UPDATE outbox.job SET rate = %s", [caution.rate])  # no command orders it with a rate
        return read_job(Tables(connection, "outbox"), job.id)


class ToyBench(RowsBench):
    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        self._rows.connection.execute(MAKE)
        self._rows.connection.execute(FILL, [ROWS])
        order = Order(kind=Kind.RETRY, source=Source.PARKED, filter={}, by="ada", selected=ROWS, caution=caution)
        return make_job(Tables(connection, "outbox"), order)

    def work(self, job: Job) -> Work:
        return ToyWork(self._settings.database, job)

    async def check(self, connection: psycopg.Connection, job: Job) -> None:
        counted = "SELECT sum(times), count(*) FILTER (WHERE times > 0) FROM public.number"
        assert connection.execute(counted).fetchone() == (job.done, job.done)


class LettersBench:
    """Letters are noted in one transaction with their count, and acknowledged behind it."""

    stride = 3

    def __init__(self, settings: Settings, letters: Letters) -> None:
        self._settings = settings
        self._letters = letters
        self._sent: Collection[str] = ()
        self._came: list[str | None] = []

    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        self._sent = await self._letters.put_all(ROWS)
        return order_letters(Tables(connection, "outbox"), RETRY, LetterSelection(), caution=caution)

    def work(self, job: Job) -> Work:
        work = work_of(self._settings, job)
        work.most = BATCH
        return work

    async def check(self, connection: psycopg.Connection, job: Job) -> None:
        assert connection.execute(NOTED_LETTERS, [job.id]).fetchone() == (job.done, job.done)
        self._came += [message.message_id for message in await self._letters.consumed()]
        assert len(set(self._came)) >= job.done
        if job.is_over:
            assert set(self._came) == set(self._sent)
            assert await self._letters.waiting() == 0


class ReplayBench:
    """Rows are counted behind their confirms; what was not saved goes out twice."""

    stride = 1

    def __init__(self, settings: Settings, sent: SentRows, copies: Copies) -> None:
        self._settings = settings
        self._rows = sent
        self._copies = copies
        self._ids: Sequence[int] = ()
        self._came: Counter[Any] = Counter()

    async def order(self, connection: psycopg.Connection, caution: Caution = NO_CAUTION) -> Job:
        self._ids = await self._rows.add(ROWS, keys=5)
        return order_replay(Tables(connection, "outbox"), SentSelection(), by="ada", why="a test", caution=caution)

    def work(self, job: Job) -> Work:
        work = work_of(self._settings, job)
        work.most = BATCH
        return work

    async def check(self, _: psycopg.Connection, job: Job) -> None:
        self._came.update(ids_of(await self._copies.read()))
        assert len(self._came) >= job.done
        settled = {each for each in self._ids if each <= job.position}
        assert settled <= self._came.keys()
        assert len(settled) == job.done
        if job.is_over:
            assert self._came.keys() == set(self._ids)
