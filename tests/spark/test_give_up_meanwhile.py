"""An operator gives a batch up while a job writes a piece or ends the batch: every order of their steps is tried."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import UUID

import psycopg
import pytest

from outbox_spark.errors import BatchError
from outbox_spark.ledger import begin_pieces, complete_pieces, take
from outbox_spark.plan import Pieces, Staged
from relay.errors import BusyError, OutboxError, UsageError
from relay.operate.batches import BatchState, BatchStatus, give_up_batch, read_batch
from relay.servers.postgres.tables import Tables

TOKEN = UUID(int=7)
PIECES = 2
EVENT = "INSERT INTO outbox.message (aggregate_type, event_type, payload, batch_id) VALUES ('a', 'e', '1', %s)"
LEFT = """
    SELECT (SELECT count(*) FROM outbox.batch WHERE version = %(version)s AND partition >= 0),
        (SELECT count(*) FROM outbox.message WHERE batch_id = %(version)s),
        EXISTS (SELECT FROM outbox.batch WHERE version = %(version)s AND partition = -1),
        EXISTS (SELECT FROM outbox.batch WHERE version = %(version)s AND given_up_at IS NOT NULL)
"""
WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND NOT granted)"
Step = Callable[[psycopg.Connection], object]


@dataclass
class Actor:
    """A session whose steps are done one after the other, each when its turn has come and no lock is in the way."""

    connection: psycopg.Connection
    steps: Sequence[Step]
    thread: ThreadPoolExecutor
    done: list[Future[object]]

    def next(self, observer: psycopg.Connection) -> None:
        """Begin the next step; return when it is done, or waits for a lock."""
        step = self.steps[len(self.done)]
        failed = [each for each in self.done if each.done() and each.exception()]
        # A step that failed may have left locks, for which another actor waits.
        self.done.append(self.thread.submit(lambda: self.connection.rollback() if failed else step(self.connection)))
        while not self.done[-1].done():
            if observer.execute(WAITS, [self.connection.info.backend_pid]).fetchone() == (True,):
                return
            time.sleep(0.001)

    def outcome(self) -> object:
        """Return what its first step has returned; raise what a step has raised."""
        first, *_ = [each.result(timeout=10) for each in self.done]
        return first


def orders(counts: dict[str, int], *before: str) -> Iterator[tuple[str, ...]]:
    """Yield every order of so many steps of each actor."""
    if not any(counts.values()):
        yield before
    for name, left in counts.items():
        if left:
            yield from orders({**counts, name: left - 1}, *before, name)


EVERY_ORDER = list(orders({"task": 2, "driver": 2, "operator": 2}))


def pieces_of(version: int) -> Pieces:
    return Pieces(PIECES, True, "", '"outbox"."batch"', f"'n', {version}", "")


def write(version: int, partition: int) -> Step:
    """Write a piece as a task does, but for the COMMIT."""

    def step(connection: psycopg.Connection) -> object:
        pieces = pieces_of(version)
        connection.execute("BEGIN")
        entered = connection.execute(pieces.enter(partition, TOKEN).encode()).fetchone()
        if entered is not None:
            connection.execute(EVENT, [version])
            connection.execute(pieces.note_rows(Staged(partition, None, 1, "c")).encode())
        return entered is not None

    return step


def complete(version: int) -> Step:
    def step(connection: psycopg.Connection) -> object:
        connection.execute("BEGIN")
        if take(connection, "outbox", "n", version) is None:
            complete_pieces(
                connection, "outbox", app_id="n", version=version, number=PIECES, token=TOKEN, table="billing.invoice"
            )
        return True

    return step


def operate(version: int) -> Step:
    def step(connection: psycopg.Connection) -> object:
        connection.execute("BEGIN")
        return give_up_batch(Tables(connection, "outbox"), "n", version, by="ada", why="over")

    return step


def commit(connection: psycopg.Connection) -> object:
    return connection.execute("COMMIT")


@pytest.fixture
def begun(connection: psycopg.Connection) -> Callable[[int, int], None]:
    """Begin a batch of this version, with so many pieces written."""

    def begin(version: int, written: int) -> None:
        begin_pieces(
            connection, "outbox", app_id="n", version=version, number=PIECES, token=TOKEN, table="billing.invoice"
        )
        for partition in range(written):
            write(version, partition)(connection)
            commit(connection)

    return begin


def outcome(actor: Actor) -> object:
    try:
        return actor.outcome()
    except (OutboxError, BatchError, psycopg.Error) as error:
        return error
    finally:
        actor.thread.submit(actor.connection.rollback).result(timeout=10)


@pytest.mark.every_postgres
@pytest.mark.parametrize("written", [1, PIECES])
def test_a_batch_ends_once_whatever_the_order_of_the_steps(
    database_url: str, connection: psycopg.Connection, begun: Callable[[int, int], None], written: int
) -> None:
    """The task writes the last piece: a missing one, or as a twin one that is written."""
    ends = set()
    with ExitStack() as opened:
        connections = [opened.enter_context(psycopg.connect(database_url, autocommit=True)) for _ in range(3)]
        threads = [opened.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        for version, order in enumerate(EVERY_ORDER):
            begun(version, written)
            scripts = ([write(version, 1), commit], [complete(version), commit], [operate(version), commit])
            task, driver, operator = (Actor(*each, []) for each in zip(connections, scripts, threads, strict=True))
            actors = {"task": task, "driver": driver, "operator": operator}

            for name in order:
                actors[name].next(connection)

            wrote, completed, gave_up = outcome(task), outcome(driver), outcome(operator)
            left = connection.execute(LEFT, {"version": version}).fetchone()
            assert left is not None
            pieces, events, is_whole, is_given_up = left
            assert pieces == events, order
            assert not (is_whole and is_given_up), order
            assert is_whole == (completed is True), (order, completed)
            assert is_given_up == isinstance(gave_up, BatchStatus), (order, gave_up)
            assert not is_whole or pieces == PIECES, order
            if isinstance(gave_up, BatchStatus):
                assert (gave_up.pieces, gave_up.rows, gave_up.tables) == (pieces, events, "billing.invoice"), order
                assert isinstance(completed, BatchError | psycopg.Error), (order, completed)
            else:  # the driver was faster, or the job was writing
                assert isinstance(gave_up, UsageError if is_whole else BusyError), (order, gave_up)
            ends.add((wrote is True, is_whole, is_given_up))

    assert len(EVERY_ORDER) == 90
    assert {(whole, given) for _, whole, given in ends} == {(True, False), (False, True)}


@pytest.mark.every_postgres
def test_the_name_of_a_batch_that_was_given_up_is_written_in_no_way(
    connection: psycopg.Connection, begun: Callable[[int, int], None]
) -> None:
    begun(7, 1)
    give_up_batch(Tables(connection, "outbox"), "n", 7, by="ada", why="over")
    words = "was given up by ada"

    for step in (write(7, 1), write(7, 0)):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=words):
            step(connection)
        connection.execute("ROLLBACK")
    with pytest.raises(BatchError, match=words):
        begun(7, 0)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=words):
        connection.execute(
            "INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts) VALUES ('n', 7, 1, %s, '{}')",
            [TOKEN],
        )
    with pytest.raises(UsageError, match="is given up already, by ada: over"):
        give_up_batch(Tables(connection, "outbox"), "n", 7, by="bob", why="again")
    begun(8, 1)

    assert read_batch(Tables(connection, "outbox"), "n", 8).state is BatchState.BEGUN
    assert connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall() == [
        ("batches give-up", "n 7", "ada", "over")
    ]


def test_a_piece_of_a_committed_batch_is_not_entered_again_when_it_was_forgotten(
    connection: psycopg.Connection, begun: Callable[[int, int], None]
) -> None:
    begun(7, PIECES)
    complete(7)(connection)
    commit(connection)
    connection.execute("DELETE FROM outbox.batch WHERE partition <> -1")

    entered = write(7, 0)(connection)
    commit(connection)

    assert entered is False
    assert connection.execute(LEFT, {"version": 7}).fetchone() == (0, PIECES, True, False)
