"""Do what a request asks for once, however often it comes: its answer is kept by its header Idempotency-Key.

What happens in the database alone commits together with its answer (`in_transaction`). What also changes something
elsewhere is noted before it begins (`noted`): if the console dies over it, a repeat is told that nobody knows.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Header
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from relay.console.access.identity import RefusedError
from relay.console.database import Database
from relay.console.repeats import Repeatable
from relay.console.site import site_of
from relay.errors import BusyError, OutboxError, PartlyDoneError
from relay.servers.postgres.tables import Tables

KEY = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="Chosen by the client, new for each request and the same for its repeats. Kept for a day.",
    ),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that changes something, as far as it is told from others."""

    known: Repeatable
    database: Database

    def in_transaction(
        self,
        by: str,
        kind: type[Any],
        act: Callable[[Tables], Any],
        *,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> Response:
        """Return the answer: what `act` returns, or what it has returned to an earlier request.

        `act` gets the tables in a session that is in a transaction, and returns a value of the type `kind`.

        Raises:
            RefusedError: the key came with another request.
            OutboxError: as `act`; nothing was done.
        """
        with self.database.session() as tables, tables.transaction():
            if (kept := self._claim(tables, by)) is not None:
                return kept
            body = _body(kind, act(tables))
            self._keep(tables, by, body, status)
        return _answer(status, body)

    def noted(self, by: str, kind: type[Any], act: Callable[[], Any]) -> Response:
        """Return the answer as `in_transaction` does, where `act` commits what it does by itself.

        Raises:
            BusyError: an earlier request with this key has no answer: it is at work, or its console has died.
            RefusedError, OutboxError: as `in_transaction`.
        """
        with self.database.session() as tables, tables.transaction():
            if (kept := self._claim(tables, by)) is not None:
                return kept
        try:
            body = _body(kind, act())
        except PartlyDoneError:
            raise  # the note stays: a repeat must not begin again unseen
        except OutboxError:
            with self.database.session() as tables:
                self.known.give_up(tables, by)
            raise
        with self.database.session() as tables:
            self._keep(tables, by, body)
        return _answer(HTTPStatus.OK, body)

    def _claim(self, tables: Tables, by: str) -> Response | None:
        kept = self.known.claim(tables, by)
        if kept is None:
            return None
        if not kept.is_same:
            raise RefusedError(
                HTTPStatus.UNPROCESSABLE_ENTITY, "this Idempotency-Key came with another request: choose a new one"
            )
        if kept.status is None:
            raise BusyError(
                "an earlier request with this Idempotency-Key has no answer: it is being worked on, or its console has"
                " died over it. Look at what is done, then repeat the rest with a new key"
            )
        return _answer(HTTPStatus(kept.status), kept.body)

    def _keep(self, tables: Tables, by: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.known.keep(tables, by, status=int(status), body=body)


async def _asked(request: Request, key: KEY) -> Asked:
    said = b"\0".join((request.method.encode(), str(request.url.path).encode(), await request.body()))
    return Asked(Repeatable(key, hashlib.sha256(said).digest()), site_of(request).database)


Once = Annotated[Asked, Depends(_asked)]


def _body(kind: type[Any], value: Any) -> bytes:
    return TypeAdapter(kind).dump_json(value)


def _answer(status: HTTPStatus, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
