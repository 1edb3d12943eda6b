"""Operations, done on the servers of the settings; the jobs that they order run in this process."""

from dataclasses import replace

from relay.config.loading import Loaded
from relay.jobs.job import Job
from relay.jobs.runner import Show
from relay.operate.bulk import run
from relay.operate.jobs import job_of
from relay.operate.operation import Asked, Given, Operation, Servers
from relay.operate.session import session


class LocalOperations:
    """See `relay.cli.operations.Operations`."""

    def __init__(self, loaded: Loaded) -> None:
        database = loaded.settings.database
        self._servers = Servers(loaded.settings, lambda timeout: session(database, timeout=timeout), file=loaded.file)

    def do(self, operation: Operation[Asked, Given], asked: Asked, *, by: str = "") -> Given:
        return operation.does(replace(self._servers, by=by), asked)

    def finish(self, operation: Operation[Asked, Given], asked: Asked, *, by: str, show: Show) -> tuple[Given, Job]:
        given = self.do(operation, asked, by=by)
        job = job_of(given)
        show(job)
        return given, run(self._servers.settings, job, show=show)
