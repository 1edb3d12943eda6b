"""The operations, asked of a console by its HTTP API (docs/api.md)."""

import time
from http import HTTPStatus
from string import Formatter
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
from annotated_types import Le
from pydantic import BaseModel, TypeAdapter, ValidationError

from relay.errors import (
    AccessError,
    BusyError,
    NotFoundError,
    NotReadyError,
    OutboxError,
    UsageError,
)
from relay.jobs.job import Job
from relay.jobs.runner import Show as ShowJob
from relay.operate import jobs
from relay.operate.asked import Page
from relay.operate.jobs import job_of
from relay.operate.operation import Asked, Effect, Given, Operation
from relay.runtime.scrub import remember

TIMEOUT = 60.0  # seconds for an answer
LOOK_INTERVAL = 0.5  # seconds between two looks at a job
TRIES, PAUSE = 3, 0.5  # of a request that got no answer; seconds between two

ERRORS: dict[int, type[OutboxError]] = {
    HTTPStatus.UNAUTHORIZED: AccessError,
    HTTPStatus.FORBIDDEN: AccessError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: BusyError,
    HTTPStatus.UNPROCESSABLE_ENTITY: UsageError,
}


class RemoteOperations:
    """See `relay.cli.operations.Operations`. The console knows by the token who asks: `by` is not sent."""

    def __init__(self, server: str, token: str) -> None:
        self._server = server
        remember(token)  # what answers may repeat it
        self._client = httpx.Client(
            base_url=f"{server.rstrip('/')}/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT,
            trust_env=server.startswith("https:"),  # else a proxy of the environment would read the token
        )

    def do(self, operation: Operation[Asked, Given], asked: Asked, *, by: str = "") -> Given:
        """Return what the operation gives; pages up to the limit that is asked for."""
        del by
        said = asked.model_dump(mode="json", exclude_defaults=True, exclude_none=True, warnings=False)
        named = [name for _, name, _, _ in Formatter().parse(operation.path) if name]
        path = operation.path.format(**{name: quote(str(said.pop(name)), safe="") for name in named})
        if (wanted := said.get("limit")) is None:
            return self._ask(operation, path, said)
        most = _most(operation.asks)
        given = self._ask(operation, path, said | {"limit": min(wanted, most)})
        while isinstance(given, Page) and given.cursor is not None and len(given.listed) < wanted:
            left = {"cursor": given.cursor, "limit": min(wanted - len(given.listed), most)}
            following: Any = self._ask(operation, path, said | left)
            given.add(following)
        return given

    def finish(self, operation: Operation[Asked, Given], asked: Asked, *, by: str, show: ShowJob) -> tuple[Given, Job]:
        given = self.do(operation, asked, by=by)
        return given, self._follow(job_of(given), show)

    def _ask(self, operation: Operation[Asked, Given], path: str, said: dict[str, Any]) -> Given:
        if operation.method == "GET":
            request = self._client.build_request("GET", path, params=said)
        else:
            # The same key with each try: what was done and got lost on its way back is answered again.
            key = {} if operation.effect is Effect.NOTHING else {"Idempotency-Key": str(uuid4())}
            request = self._client.build_request("POST", path, json=said, headers=key)
        given: Given = self._read(operation.gives, request)
        return given

    def _follow(self, job: Job, show: ShowJob) -> Job:
        """Return a job that the console runs when it has ended, or is paused."""
        while True:
            show(job)
            if job.is_over or job.state == "paused":
                return job
            time.sleep(LOOK_INTERVAL)
            job = self.do(jobs.show, jobs.ShowJob(job=job.id, limit=1)).job

    def _read(self, kind: Any, request: httpx.Request) -> Any:
        answer = self._send(request)
        try:
            if answer.is_success:
                return TypeAdapter(kind).validate_json(answer.content)
            words = TypeAdapter(dict[str, Any]).validate_json(answer.content)["detail"]
        except (ValidationError, KeyError) as error:
            raise NotReadyError(
                f"{self._server} does not answer as a console of this release: status {answer.status_code}"
            ) from error
        raise ERRORS.get(answer.status_code, NotReadyError)(words)

    def _send(self, request: httpx.Request) -> httpx.Response:
        for tries in range(1, TRIES + 1):
            try:
                return self._client.send(request)
            except httpx.TransportError as error:
                if tries == TRIES:
                    raise NotReadyError(f"{self._server}: {error}; see that `relay console` runs there") from error
                time.sleep(PAUSE)
        raise AssertionError


def _most(asks: type[BaseModel]) -> int:
    """Return how many rows the API gives at a time."""
    (most,) = [each.le for each in asks.model_fields["limit"].metadata if isinstance(each, Le)]
    return int(str(most))
