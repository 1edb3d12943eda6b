"""Rows that cannot be delivered, written beside those of innocent keys: what do the latter wait?"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import psycopg

from bench.frame.backlog import EVENT_TYPE
from bench.frame.queue import declare_full

INTERVAL, KEYS = 0.1, 10  # seconds between two transactions, and the keys of the rows in each
FULL, NOWHERE = "bench.full", "bench.nowhere"  # queues: the one takes no message, the other is not there
UNSENDABLE = '{"' + "x" * 129 + '": true}'  # no AMQP header may have so long a name

WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key, headers)
    SELECT 'guilty', key::text, %(event_type)s, '1', %(exchange)s, %(routing_key)s, %(headers)s
    FROM generate_series(1, %(keys)s) AS key
"""
FORGET = "DELETE FROM outbox.message WHERE aggregate_type = 'guilty'"


class Guilt(StrEnum):
    """Why they cannot be delivered."""

    QUEUE = "a queue is full"  # it refuses each message: backoff, then quarantine
    ROUTE = "a route is missing"  # each is returned: quarantine
    ROW = "rows cannot be sent"  # each key's first row is parked, the others wait behind it


ADDRESSES: dict[Guilt, dict[str, str | None]] = {
    Guilt.QUEUE: {"exchange": "", "routing_key": FULL, "headers": None},
    Guilt.ROUTE: {"exchange": "", "routing_key": NOWHERE, "headers": None},
    Guilt.ROW: {"exchange": None, "routing_key": None, "headers": UNSENDABLE},
}


@contextmanager
def guilty_rows(database_url: str, broker_url: str, guilt: Guilt) -> Iterator[None]:
    """Write such rows within the block, from its beginning to its end, and remove them then."""
    if guilt is Guilt.QUEUE:
        declare_full(broker_url, FULL)
    values = {"event_type": EVENT_TYPE, "keys": KEYS, **ADDRESSES[guilt]}
    done = threading.Event()
    with psycopg.connect(database_url, autocommit=True) as connection:

        def write() -> None:
            while not done.wait(INTERVAL):
                connection.execute(WRITE, values)

        writer = threading.Thread(target=write, name="guilty")
        writer.start()
        try:
            yield
        finally:
            done.set()
            writer.join()
            forget(connection)


def forget(connection: psycopg.Connection) -> None:
    """Remove them, also while the relay moves them from partition to partition."""
    while True:
        try:
            connection.execute(FORGET)
        except psycopg.errors.SerializationFailure:
            continue
        return
