"""An exercise: a bulk action of one file. It counts up numbers, and the runner does all the rest."""

from relay.config.settings import DatabaseSettings
from relay.jobs.job import Job
from relay.jobs.work import FULL, Did, Ended, Pace, Save, StageOutcome, Step, Waits, stage_of
from relay.operate.session import SessionWork

MAKE = "CREATE TABLE public.number (id bigint PRIMARY KEY, times integer NOT NULL DEFAULT 0)"
FILL = "INSERT INTO public.number (id) SELECT generate_series(1, %s)"
NEXT = "SELECT id FROM public.number WHERE id > %s ORDER BY id LIMIT %s"
COUNT_UP = "UPDATE public.number SET times = times + 1 WHERE id = ANY (%s)"
FAILING = "SELECT count(*) FROM public.number WHERE id > %s AND id <= %s AND id %% 2 = 1"


class ToyWork(SessionWork):
    """Counts each number up once. Odd numbers "fail" a look later."""

    most = 3
    left = "the others stay"

    def __init__(self, database: DatabaseSettings, job: Job) -> None:
        super().__init__(database)
        self.pace = Pace(job.rate or FULL)
        self._has_waited = False

    async def step(self, room: int, save: Save) -> Step:
        connection = self._connection
        async with connection.transaction():
            found = await connection.execute(NEXT, [save.job.position, room])
            ids = [id_ for (id_,) in await found.fetchall()]
            if not ids:
                return Ended()
            await connection.execute(COUNT_UP, [ids])
            did = Did(done=len(ids), position=ids[-1])
            await save(connection, did)
        return did

    async def outcome(self, save: Save) -> StageOutcome | Waits:
        self._has_waited = not self._has_waited
        if self._has_waited:
            return Waits(0.001)
        job, connection = save.job, self._connection
        stage = stage_of(job)
        assert stage is not None
        found = await (await connection.execute(FAILING, [stage.begin, job.position])).fetchone()
        assert found is not None
        rows, (failing,) = job.done - stage.begin, found
        outcome = StageOutcome(rows=rows, failing=failing, failed=failing, words=f"{failing} of {rows} numbers are odd")
        await save(connection, outcome)
        return outcome
