"""Changes of dead letters, each written to the audit."""

from collections.abc import Callable
from typing import Any

import psycopg

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.jobs.job import Caution, Job
from relay.jobs.runner import Run
from relay.operate.letters.audit import AuditEntry
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.work import LettersDone, LettersWork, order_letters
from relay.servers.postgres.tables import Tables
from tests.consume.effects import QUEUE
from tests.dead_letters.letters import DEAD, NO_FILTER, Letters
from tests.support.bulk import settings_of

RETRY = AuditEntry("retry", DEAD, QUEUE, "ann@desk", "the tax office is open again")
DISCARD = AuditEntry("discard", DEAD, None, "ann@desk", "test data")
AUDIT = "SELECT * FROM outbox.dead_letter_audit ORDER BY id"

Audit = psycopg.Connection[dict[str, Any]]


async def change(
    letters: Letters,
    entry: AuditEntry,
    audit: Audit,
    selection: LetterSelection = NO_FILTER,
    *,
    rate: float | None = None,
) -> LettersDone:
    """Order a job over letters, and run it to its end."""
    with psycopg.connect(audit.info.dsn, password=audit.info.password, autocommit=True) as connection:
        job = order_letters(Tables(connection, "outbox"), entry, selection, caution=Caution(rate=rate))
        database = settings_of(connection).database
    return await run_letters(database, letters.broker, job)


async def run_letters(
    database: DatabaseSettings, broker: BrokerSettings, job: Job, *, begun: Callable[[Run], None] = lambda _: None
) -> LettersDone:
    """Do the rest of a job. `begun` gets the run, and may stop it."""
    work = LettersWork(database, broker, job)
    run = Run("outbox", job, work, drain_timeout=5)
    begun(run)
    return work.result(await run.run())
