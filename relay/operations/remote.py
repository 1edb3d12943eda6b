"""The operations, asked of a console by its HTTP API (docs/api.md)."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from pydantic import TypeAdapter, ValidationError

from relay.config.loading import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from relay.errors import (
    AccessError,
    BusyError,
    NotFoundError,
    NotReadyError,
    OutboxError,
    UsageError,
)
from relay.jobs.job import Caution, Job, Kind
from relay.jobs.runner import Show as ShowJob
from relay.operate.batches import BatchStatus
from relay.operate.doctor.finding import Finding
from relay.operate.letters.audit import Entry
from relay.operate.letters.letter import Letter
from relay.operate.letters.letter import Selection as LetterSelection
from relay.operate.letters.read import Read
from relay.operate.letters.work import Done as LettersDone
from relay.operate.letters.work import Show, done_by_console
from relay.operate.messages.whereabouts import RowId
from relay.operate.parked.read import ARCHIVED, ParkedMessage
from relay.operate.parked.read import Selection as ParkedSelection
from relay.operate.parked.work import Done
from relay.operate.pauses import LaneStatus
from relay.operate.pool import PoolsStatus
from relay.operate.routes.quarantine import Changed, RouteStatus
from relay.operate.sent.selection import Filter
from relay.operate.sent.target import Target
from relay.operate.status import Node, Status
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
from relay.runtime.scrub import remember

MOST = 1000  # rows that one request lists or changes
TOKEN = re.compile(r"[!-~]+")
TIMEOUT = 60.0  # seconds for an answer
LOOK_INTERVAL = 0.5  # seconds between two looks at a job
TRIES, PAUSE = 3, 0.5  # of a request that got no answer; seconds between two

Answer = TypeVar("Answer")

ERRORS: dict[int, type[OutboxError]] = {
    HTTPStatus.UNAUTHORIZED: AccessError,
    HTTPStatus.FORBIDDEN: AccessError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: BusyError,
    HTTPStatus.UNPROCESSABLE_ENTITY: UsageError,
}


class RemoteOperations:
    """See `relay.operations.operations.Operations`. The console knows by the token who asks: `by` is not sent.

    Raises:
        UsageError: the URL cannot be that of a console, or would send the token unencrypted over a network.
    """

    def __init__(self, server: str, token: str) -> None:
        self._server = server
        remember(token)  # what answers may repeat it
        check_server(server)
        if not TOKEN.fullmatch(token):
            raise UsageError(
                f"the token in {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} has a character that cannot be in a token"
            )
        self._client = httpx.Client(
            base_url=f"{server.rstrip('/')}/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT,
            trust_env=server.startswith("https:"),  # else a proxy of the environment would read the token
        )

    def status(self) -> Status:
        return self._get(Status, "/status")

    def nodes(self) -> list[Node]:
        return self._get(list[Node], "/nodes")

    def doctor(self) -> list[Finding]:
        findings = self._get(dict[str, Any], "/doctor")["findings"]
        return TypeAdapter(list[Finding]).validate_python(findings)

    def pools(self, names: Sequence[str]) -> PoolsStatus:
        return self._get(PoolsStatus, "/pool/status", {"pool": list(names)})

    def list_failures(
        self, queues: Sequence[str], *, with_held: bool, group: str | None = None, limit: int | None = None
    ) -> Failures:
        given = {"held": with_held, "group": group, "limit": limit}
        chosen = {name: value for name, value in given.items() if value is not None}
        if not queues:
            return self._get(Failures, "/failures", chosen)
        return self._look(Failures, "/failures/look", {"queue": list(queues), **chosen})

    def list_parked(self, selection: ParkedSelection, *, with_held: bool, state: str) -> ParkedRows:
        asked = {**_parked(selection), "held": with_held, "archived": state == ARCHIVED}
        pages = self._pages("/parked", asked, "rows", selection.limit)
        return TypeAdapter(ParkedRows).validate_python({"rows": pages["rows"], "total": pages["total"]})

    def show_parked(self, row: RowId, *, is_full: bool) -> ParkedMessage:
        return self._look(ParkedMessage, f"/parked/{row}/reveal", {"full": is_full})

    def preview_parked(self, kind: Kind, selection: ParkedSelection) -> Done:
        limit = {} if selection.limit is None else {"limit": selection.limit}
        return self._get(Done, "/parked/preview", {**_parked(selection), **limit, "kind": kind})

    def change_parked(
        self, kind: Kind, selection: ParkedSelection, *, by: str, why: str | None, caution: Caution, show: ShowJob
    ) -> Done:
        del by
        body = {
            **_parked(selection),
            "all": selection.is_everything,
            "limit": selection.limit,
            "why": why or "",
            **_careful(caution),
        }
        ordered = self._post(Ordered, f"/parked/{kind}", body)
        job = self._follow(ordered.job, show)
        return Done(job.done, job.released, ordered.not_found, job.id, job.state)

    def list_letters(self, queue: str, selection: LetterSelection) -> ListedLetters:
        limit = min(MOST, selection.limit or MOST)
        told = self._look(dict[str, Any], "/dead-letters/look", {**_letters(queue, selection), "limit": limit})
        letters = TypeAdapter(list[Letter]).validate_python(told["letters"])
        return ListedLetters(told["queue"], letters, Read(told["messages"], told["matched"], told["warning"]))

    def look_at_letters(self, queue: str, selection: LetterSelection, *, first: int) -> SeenLetters:
        found = self.list_letters(queue, selection)
        failed = [each.last_failed_at for each in found.letters if each.last_failed_at is not None]
        return SeenLetters(found.read, min(failed, default=None), found.letters[:first])

    def show_letter(self, queue: str, message_id: str) -> dict[str, Any]:
        return self._look(dict[str, Any], "/dead-letters/reveal", {"queue": queue, "message_id": message_id})

    def preview_letters(self, entry: Entry, selection: LetterSelection) -> LettersDone:
        limit = min(MOST, selection.limit or MOST)
        return self._look(LettersDone, "/dead-letters/preview", {**_letters(entry.queue, selection), "limit": limit})

    def change_letters(self, entry: Entry, selection: LetterSelection, *, caution: Caution, show: Show) -> LettersDone:
        body = {
            **_letters(entry.queue, selection),
            "all": selection.is_everything,
            "limit": selection.limit,
            "why": entry.why,
            **_careful(caution),
        }
        ordered = self._post(Job, f"/dead-letters/{entry.command}", body)
        return done_by_console(self._follow(ordered, lambda job: show(job.selected or job.done, job.done, job.failed)))

    def retry_held(self, group: str | None, *, by: str, why: str) -> int:
        del by
        chosen: dict[str, Any] = {"all": True} if group is None else {"group": group}
        return self._post(dict[str, int], "/held/retry", {**chosen, "why": why})["messages"]

    def list_routes(self, *, group: str | None) -> list[RouteStatus]:
        return self._get(list[RouteStatus], "/quarantine", {} if group is None else {"group": group})

    def show_route(self, named: RowId, *, limit: int) -> ShownRoute:
        pages = self._pages(f"/quarantine/{named}", {}, "rows", limit)
        return TypeAdapter(ShownRoute).validate_python({"route": pages["route"], "rows": pages["rows"]})

    def preview_route(self, route: int, rows: Sequence[RowId], *, limit: int) -> RoutePreview:
        asked = {"route": route, "ids": list(map(str, rows)), "limit": limit}
        return self._get(RoutePreview, "/quarantine/preview", asked)

    def reroute(
        self, route: int, rows: Sequence[RowId], *, to_exchange: str | None, routing_key: str | None, by: str, why: str
    ) -> Changed:
        del by
        target = {"to_exchange": to_exchange, "routing_key": routing_key}
        return self._post(Changed, "/quarantine/reroute", {**_of_route(route, rows), **target, "why": why})

    def discard_route(self, route: int, rows: Sequence[RowId], *, by: str, why: str, show: ShowJob) -> Done:
        del by
        ordered = self._post(Ordered, "/quarantine/discard", {**_of_route(route, rows), "why": why})
        job = self._follow(ordered.job, show)
        return Done(job.done, job.released, ordered.not_found, job.id, job.state)

    def probe(self, routes: Sequence[int]) -> list[int]:
        return self._post(dict[str, list[int]], "/quarantine/probe", {"routes": list(routes)})["routes"]

    def pause_route(self, exchange: str, routing_key: str, *, by: str, why: str) -> RouteStatus:
        del by
        body = {"exchange": exchange, "routing_key": routing_key, "why": why}
        return self._post(RouteStatus, "/quarantine/pause", body)

    def resume_route(self, route: int, *, by: str, why: str | None) -> RouteStatus:
        del by
        return self._post(RouteStatus, "/quarantine/resume", {"route": route, "why": why or ""})

    def list_lanes(self) -> list[LaneStatus]:
        return self._get(list[LaneStatus], "/lanes")

    def pause_lane(self, lane: int, *, by: str, why: str) -> LaneStatus:
        del by
        return self._post(LaneStatus, f"/lanes/{lane}/pause", {"why": why})

    def resume_lane(self, lane: int, *, by: str, why: str | None) -> LaneStatus:
        del by
        return self._post(LaneStatus, f"/lanes/{lane}/resume", {"why": why or ""})

    def list_batches(self, *, limit: int) -> list[BatchStatus]:
        return self._get(list[BatchStatus], "/batches", {"limit": min(MOST, limit)})

    def show_batch(self, app_id: str, version: int) -> BatchStatus:
        return self._get(BatchStatus, "/batches/show", {"app_id": app_id, "version": version})

    def give_up_batch(self, app_id: str, version: int, *, by: str, why: str) -> BatchStatus:
        del by
        return self._post(BatchStatus, "/batches/give-up", {"app_id": app_id, "version": version, "why": why})

    def preview_replay(self, asked: Filter) -> ReplayPreview:
        given = {name: value for name, value in asdict(asked).items() if value is not None}
        return self._get(ReplayPreview, "/replay/preview", given)

    def replay(self, asked: Filter, target: Target, *, why: str | None, caution: Caution, show: ShowJob) -> Job:
        """Have the console send; return the job when it has ended, or is paused."""
        given = {name: value for name, value in asdict(asked).items() if value is not None}
        address = {"to_exchange": target.exchange, "routing_key": target.routing_key, "trace": target.trace}
        ids = {"message_ids": [str(each) for each in asked.message_ids or ()]}
        body = {**given, **ids, **address, **_careful(caution), "all": asked == Filter(), "why": why or ""}
        return self._follow(self._post(Job, "/replay", body), show)

    def list_jobs(self, *, limit: int, kind: Kind | None) -> list[Job]:
        asked = {} if kind is None else {"kind": kind}
        return TypeAdapter(list[Job]).validate_python(self._pages("/jobs", asked, "rows", limit)["rows"])

    def show_job(self, job: int, *, limit: int) -> ShownJob:
        pages = self._pages(f"/jobs/{job}", {}, "failures", limit)
        return TypeAdapter(ShownJob).validate_python({"job": pages["job"], "failures": pages["failures"]})

    def pause_job(self, job: int, *, by: str, why: str | None) -> Job:
        del by
        return self._post(Job, f"/jobs/{job}/pause", {"why": why or ""})

    def resume_job(self, job: int, *, why: str | None, show: ShowJob) -> Job:
        """Have the console go on with a job; return it when it has ended, or is paused."""
        return self._follow(self._post(Job, f"/jobs/{job}/resume", {"why": why or ""}), show)

    def cancel_job(self, job: int, *, by: str, why: str) -> Job:
        del by
        return self._post(Job, f"/jobs/{job}/cancel", {"why": why})

    def _follow(self, job: Job, show: ShowJob) -> Job:
        """Return a job that the console runs when it has ended, or is paused."""
        while True:
            show(job)
            if job.is_over or job.state == "paused":
                return job
            time.sleep(LOOK_INTERVAL)
            job = self.show_job(job.id, limit=1).job

    def _pages(self, path: str, asked: Mapping[str, Any], name: str, limit: int | None) -> dict[str, Any]:
        """Return the first page, with the rows of the following ones up to the limit."""
        whole: dict[str, Any] = {}
        cursor: dict[str, str] = {}
        while True:
            left = MOST if limit is None else limit - len(whole.get(name, ()))
            page = self._get(dict[str, Any], path, {**asked, **cursor, "limit": min(MOST, left)})
            whole = whole or {**page, name: []}
            whole[name] += page[name]
            if page["next"] is None or len(whole[name]) == limit:
                return whole
            cursor = {"cursor": page["next"]}

    def _get(self, kind: type[Answer], path: str, asked: Mapping[str, Any] | None = None) -> Answer:
        return self._read(kind, self._client.build_request("GET", path, params=asked))

    def _look(self, kind: type[Answer], path: str, body: Mapping[str, Any]) -> Answer:
        """Return what is read by a POST, as to read it leaves a trace, in a queue or in the audit."""
        return self._read(kind, self._client.build_request("POST", path, json=body))

    def _post(self, kind: type[Answer], path: str, body: Mapping[str, Any]) -> Answer:
        # The same key with each try: what was done and got lost on its way back is answered again.
        key = {"Idempotency-Key": str(uuid4())}
        return self._read(kind, self._client.build_request("POST", path, json=body, headers=key))

    def _read(self, kind: type[Answer], request: httpx.Request) -> Answer:
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


def check_server(server: str) -> None:
    """See that a URL may be that of a console, and that a token goes to it encrypted, or stays on this host.

    Raises:
        UsageError: it may not be.
    """
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError("--server takes the URL of a console, https://relay.example.org")
    if url.scheme == "http" and not _is_loopback(url.host):
        raise UsageError("--server: over http:// others can read the token; use https://, or a console on this host")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parked(selection: ParkedSelection) -> dict[str, Any]:
    ids = [*(selection.ids or ()), *(selection.message_ids or ())]
    names = ("aggregate_type", "aggregate_id", "event_type", "reason", "group")
    given = {name: value for name in names if (value := getattr(selection, name)) is not None}
    return {**given, "ids": [str(each) for each in ids]}


def _careful(caution: Caution) -> dict[str, Any]:
    return {name: value for name, value in asdict(caution).items() if value not in (None, ())}


def _letters(queue: str, selection: LetterSelection) -> dict[str, Any]:
    names = {"aggregate_type": "aggregate_type", "aggregate_id": "aggregate_id", "type": "event_type"}
    names |= {each: each for each in ("reason", "exception", "consumer", "group")}
    given = {new: value for name, new in names.items() if (value := getattr(selection, name)) is not None}
    times = {name: moment.isoformat() for name in ("since", "until") if (moment := getattr(selection, name))}
    return {**given, **times, "queue": queue, "message_ids": sorted(selection.message_ids)}


def _of_route(route: int, rows: Sequence[RowId]) -> dict[str, Any]:
    return {"route": route, "ids": [str(each) for each in rows]}
