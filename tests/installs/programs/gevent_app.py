"""A WSGI application that gunicorn serves with its gevent worker: it writes events, and tries to publish one."""

import asyncio
import os
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

import psycopg

from relay.outbox import Event, add
from relay.publisher import DurablePublisher

DATABASE, BROKER = os.environ["RELAY_DATABASE_URL"], os.environ["RELAY_BROKER_URL"]


def write() -> str:
    with psycopg.connect(DATABASE) as connection:
        connection.execute("SELECT pg_advisory_xact_lock_shared(1)")  # the test has it until all requests have come
        add(connection, Event("customer", "17", "InvoiceIssued", {"invoice": 42}))
    return "written"


def publish() -> str:
    try:
        return asyncio.run(published())
    except Exception as error:  # the test sees which
        return f"{type(error).__name__}: {error}"


async def published() -> str:
    async with DurablePublisher(DATABASE, broker=BROKER, name="web") as publisher:
        await publisher.publish(Event("sensor", "42", "Measured", {"celsius": 21.5}))
    return "published"


PATHS: dict[str, Callable[[], str]] = {"/write": write, "/publish": publish}


def app(environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    answer = PATHS[environment["PATH_INFO"]]().encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(answer)))])
    return [answer]
