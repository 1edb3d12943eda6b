"""What `add` and `add_many` cost an application, next to its own INSERTs of the same rows: `python -m bench.write`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import orjson
import psycopg

from bench.frame.processes import wait_idle
from bench.frame.run import Bench, Column, Count, Figures, main
from bench.frame.servers import make_wal_files, private_postgres
from relay.outbox import Event, add, add_many, event

PAYLOAD = {"invoice": 42, "amount": "9.90", "lines": [{"article": "A-1", "count": 2}, {"article": "B-7", "count": 1}]}
TRANSACTION = 100  # events that are written one by one, in a transaction
MANY = 1000  # events of one call

INSERT = """
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload)
    VALUES (%s, %s, %s, %s, %s)
"""

EMPTY = "TRUNCATE outbox.message"

Write = Callable[[psycopg.Connection], object]


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is written, and for how long a side writes."""

    postgres_pid: int
    connection: psycopg.Connection
    seconds: float


@event("InvoiceIssued", version=1, key=("invoice", "invoice"))
@dataclass
class Issued:
    invoice: int
    amount: str
    lines: list[dict[str, str | int]]


def measure(*, rounds: Count = 5, seconds: Count = 3, run: Bench) -> None:
    """Measure what writing events costs.

    Parameters
    ----------
    rounds
        How often each side is measured; the sides alternate.
    seconds
        For how long each.
    """
    columns = Column("us an event", "cost", 1), Column("of its own INSERT", "cost", 2, is_ratio=True)
    one = run.table(f"One event at a time, {TRANSACTION} a transaction", *columns)
    many = run.table(f"{MANY:,} events at once, in one transaction", *columns)
    with private_postgres(run) as (postgres_pid, url), psycopg.connect(url) as connection:
        make_wal_files(url)
        place = Place(postgres_pid, connection, seconds)
        alone = partial(_measure, place, TRANSACTION)
        one.measure(
            {
                "its own INSERT": partial(alone, _one_by_one(lambda to: to.execute(INSERT, _row()))),
                "add": partial(alone, _one_by_one(lambda to: add(to, _event()))),
                "add, a declared event": partial(alone, _one_by_one(lambda to: add(to, Issued(**PAYLOAD)))),  # type: ignore[arg-type]
            },
            rounds,
            warm_up=1,
        )
        together = partial(_measure, place, MANY)
        many.measure(
            {
                "executemany": partial(together, _executemany),
                "add_many": partial(together, lambda to: add_many(to, [_event() for _ in range(MANY)])),
            },
            rounds,
            warm_up=1,
        )


def _measure(place: Place, events: int, write: Write) -> Figures:
    """Measure transactions of so many events; the commit is not counted, as both sides have the same."""
    connection = place.connection
    connection.execute(EMPTY)
    connection.commit()
    wait_idle(place.postgres_pid)
    taken, transactions = 0.0, 0
    until = time.monotonic() + place.seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        write(connection)
        taken += time.perf_counter() - began
        transactions += 1
        connection.commit()
    return {"cost": taken / transactions / events * 1e6}


def _one_by_one(write: Write) -> Write:
    def write_all(connection: psycopg.Connection) -> None:
        for _ in range(TRANSACTION):
            write(connection)

    return write_all


def _executemany(connection: psycopg.Connection) -> None:
    connection.cursor().executemany(INSERT, [_row() for _ in range(MANY)])


def _row() -> tuple[object, ...]:
    return uuid4(), "invoice", "42", "InvoiceIssued", orjson.dumps(PAYLOAD).decode()


def _event() -> Event:
    return Event("invoice", "42", "InvoiceIssued", PAYLOAD)


if __name__ == "__main__":
    main(measure)
