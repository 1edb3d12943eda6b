"""Applications that write: each a process with a connection, so that no one waits for another's Python."""

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg

from bench.frame.backlog import AGGREGATE_TYPE, EVENT_TYPE, PAYLOAD_BYTES
from bench.frame.notes import open_notes

WRITERS = 8
HOLD = (0.001, 0.020)  # seconds that a steady writer's transaction stays open after its insert
HEAD_START = 1.0  # seconds for all writers to connect before the first one writes
# Seconds of writing flat out that do not count. The relay sleeps when they begin. With the trigger it wakes at the
# first row, without it only when it polls; until then the writers have the cores to themselves.
WAKE_UP = 2.0
KEYS = 5000

INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    VALUES (%s, %s, %s, %s) RETURNING id
"""
BATCH = 10  # rows of a transaction that writes many
INSERT_BATCH = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT %(aggregate_type)s, key, %(event_type)s, %(payload)s FROM unnest(%(keys)s::text[]) AS key RETURNING id
"""
PAYLOAD = '{"note":"' + "n" * (PAYLOAD_BYTES - len('{"note":""}')) + '"}'


class Commit(NamedTuple):
    """A row, and when its transaction ended: seconds since the epoch, as the database's own clock has them."""

    id: int
    asked_at: float  # just before COMMIT was sent
    returned_at: float  # just after its answer came


@contextmanager
def writer_pool() -> Iterator[ProcessPoolExecutor]:
    """Return WRITERS processes, ended with the block."""
    with ProcessPoolExecutor(WRITERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Ctrl-C reaches all processes of the terminal. The writers inherit that it is ignored: we alone decide.
        ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(WRITERS):
                pool.submit(time.time)  # starts a process when all that there are have something to do
        finally:
            signal.signal(signal.SIGINT, ours)
        try:
            yield pool
        except BaseException:  # Ctrl-C too: else the end of the block waits for writers in the midst of a round
            for writer in multiprocessing.active_children():
                writer.terminate()
            raise


def write_steadily(
    pool: ProcessPoolExecutor, database_url: str, rate: float, seconds: float, *, hold: tuple[float, float] = HOLD
) -> list[Commit]:
    """Write `rate` rows a second, one a transaction, for `seconds`; give them in the order of their commits.

    The transactions last 1-20 ms and overlap, so ids become visible out of their order all the time. So eight writers
    do not reach 750 a second; with a shorter `hold` they do.
    """
    start = time.time() + HEAD_START
    tasks = [
        pool.submit(_write_steadily, database_url, number, start, seconds, interval=WRITERS / rate, hold=hold)
        for number in range(WRITERS)
    ]
    return sorted((commit for task in tasks for commit in task.result()), key=lambda commit: commit.returned_at)


def start_batches(
    pool: ProcessPoolExecutor, database_url: str, rate: float, seconds: float, *, folder: Path
) -> dict[Path, Future[None]]:
    """Begin to write `rate` rows a second for `seconds`, BATCH of them a transaction; give each writer's work.

    Each notes its rows, as their COMMIT is answered, in the file that its work is given under (bench/frame/notes.py).
    Transactions last and overlap as those of `write_steadily`, and eight writers reach 5,000 rows a second so.
    """
    start = time.time() + HEAD_START
    files = [folder / f"commits-{number}" for number in range(WRITERS)]
    return {
        file: pool.submit(
            _write_batches, database_url, number, start, seconds, interval=WRITERS * BATCH / rate, file=file
        )
        for number, file in enumerate(files)
    }


def write_flat_out(pool: ProcessPoolExecutor, database_url: str, seconds: float) -> float:
    """Write as fast as all writers can, one row a transaction; give their commits a second, once the relay is awake."""
    start = time.time() + HEAD_START
    tasks = [pool.submit(_write_flat_out, database_url, number, start, seconds) for number in range(WRITERS)]
    return sum(task.result() for task in tasks) / seconds


def _write_steadily(
    database_url: str, number: int, start: float, seconds: float, *, interval: float, hold: tuple[float, float]
) -> list[Commit]:
    numbers = random.Random(number)
    commits: list[Commit] = []
    due = start + interval * number / WRITERS  # spread evenly, so that the load is even too
    with psycopg.connect(database_url) as connection:
        while due < start + seconds:
            # A writer that is late writes at once: the rate holds on average, as with a queue of requests.
            time.sleep(max(0.0, due - time.time()))
            id_ = _insert(connection, numbers)
            time.sleep(numbers.uniform(*hold))
            asked_at = time.time()
            connection.commit()
            commits.append(Commit(id_, asked_at, time.time()))
            due += interval
    return commits


def _write_batches(
    database_url: str, number: int, start: float, seconds: float, *, interval: float, file: Path
) -> None:
    numbers, note = random.Random(number), open_notes(file)
    due = start + interval * number / WRITERS
    with psycopg.connect(database_url) as connection:
        while due < start + seconds:
            time.sleep(max(0.0, due - time.time()))
            keys = [str(numbers.randrange(KEYS)) for _ in range(BATCH)]
            values = {"aggregate_type": AGGREGATE_TYPE, "event_type": EVENT_TYPE, "payload": PAYLOAD, "keys": keys}
            ids = [id_ for (id_,) in connection.execute(INSERT_BATCH, values)]
            time.sleep(numbers.uniform(*HOLD))
            connection.commit()
            note(ids)
            due += interval


def _write_flat_out(database_url: str, number: int, start: float, seconds: float) -> int:
    numbers = random.Random(number)
    commits = 0
    with psycopg.connect(database_url, autocommit=True) as connection:
        time.sleep(max(0.0, start - time.time()))
        counted_from = start + WAKE_UP
        while (now := time.time()) < counted_from + seconds:
            _insert(connection, numbers)
            commits += now >= counted_from
    return commits


def _insert(connection: psycopg.Connection, numbers: random.Random) -> int:
    key = str(numbers.randrange(KEYS))
    row = connection.execute(INSERT, (AGGREGATE_TYPE, key, EVENT_TYPE, PAYLOAD)).fetchone()
    assert row is not None, "RETURNING gives a row for each one inserted"
    return int(row[0])
