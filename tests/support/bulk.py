"""Retries and discards of parked rows, each from its order to its end."""

import asyncio
from collections.abc import Callable

import psycopg
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import DatabaseSettings, Settings
from relay.jobs.job import NO_CAUTION, Caution, Job, Kind, Source
from relay.jobs.runner import Show
from relay.operate.bulk import run_of, work_of
from relay.operate.parked import work as parked
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import ParkedDone, order_rows, rows_not_found
from relay.servers.postgres.tables import Tables


def run_rows(connection: psycopg.Connection, job: Job, *, show: Show = lambda _: None) -> Job:
    """Run a job on the database that a connection leads to; from any thread that has no event loop."""

    async def run() -> Job:
        settings = settings_of(connection)
        return await run_of(settings, job, work_of(settings, job), show=show).run()

    return asyncio.run(run())


def change_rows(
    connection: psycopg.Connection,
    kind: Kind,
    selection: ParkedSelection,
    *,
    by: str | None = None,
    why: str | None = None,
    caution: Caution = NO_CAUTION,
    show: Show = lambda _: None,
    aside: Source | None = None,
) -> ParkedDone:
    """Order a job over parked rows, or those set aside, and run it to its end."""
    tables = Tables(connection, "outbox")
    not_found = rows_not_found(tables, kind, selection, aside=aside)
    job = order_rows(tables, kind, selection, by=by, why=why, caution=caution, aside=aside)
    job = run_rows(connection, job, show=show)
    return ParkedDone(job.done, job.released, not_found, job.id, job.state)


def settings_of(connection: psycopg.Connection) -> Settings:
    """Return the settings of the database that a connection leads to."""
    info = connection.info
    url = URL.build(
        scheme="postgresql", user=info.user, password=info.password or None, host=info.host, port=info.port,
        path=f"/{info.dbname}",
    )  # fmt: skip
    return Settings(database=DatabaseSettings(url=SecretStr(str(url))))


def preview(connection: psycopg.Connection, schema: str, selection: ParkedSelection) -> ParkedDone:
    """Return what a retry would do."""
    return parked.preview(Tables(connection, schema), Kind.RETRY, selection)


def retry(
    connection: psycopg.Connection,
    schema: str,
    selection: ParkedSelection,
    *,
    by: str | None = None,
    why: str | None = None,
) -> ParkedDone:
    """Send rows again."""
    return change_rows(connection, Kind.RETRY, selection, by=by, why=why)


def discard(
    connection: psycopg.Connection, schema: str, selection: ParkedSelection, *, by: str, why: str
) -> ParkedDone:
    """Discard rows."""
    return change_rows(connection, Kind.DISCARD, selection, by=by, why=why)


async def operate(database_url: str, change: Callable[[psycopg.Connection], ParkedDone]) -> ParkedDone:
    """Do this on a session of an operator, while a relay runs in this process."""

    def run() -> ParkedDone:
        with psycopg.connect(database_url, autocommit=True) as connection:
            return change(connection)

    return await asyncio.to_thread(run)
