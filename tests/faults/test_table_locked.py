"""A session locks a table that the relay needs: the relay keeps its own session, and names the blocking one."""

from functools import partial

import psycopg
import pytest

from relay.config.settings import KeyPolicy, Route, Settings, Unroutable
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.faults.blockers import is_named
from tests.support.eventually import eventually

LOCK = "LOCK TABLE outbox.{} IN SHARE MODE"  # as CREATE INDEX takes it: it lets readers in and no writer
PARK_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('outbox.park', 0))"  # as `relay parked retry` takes it


async def is_marked(outbox: Outbox, row: int) -> bool:
    found = await outbox.connection.execute("SELECT FROM outbox.message WHERE state = 'sent' AND id = %s", [row])
    return found.rowcount == 1


async def test_pending_rows_are_read_when_the_lock_is_gone(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """The pending rows are locked; the relay names the session, keeps its own, and sends after the lock."""
    rows = [await outbox.insert("a") for _ in range(3)]

    async with run_node(max_window_rows=1, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute("LOCK TABLE outbox.message_pending IN ACCESS EXCLUSIVE MODE")
        await is_named(writer, "has locked message_pending", node)
        await writer.commit()

        await eventually(outbox.is_empty, "every row is marked")
        assert not node.snapshot().database_losses

    assert await queue.ids(3) == rows


async def test_rows_are_marked_when_the_lock_on_their_count_is_gone(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """The table of counts is locked; the relay names the session, and marks after the lock."""
    await writer.execute(LOCK.format("published").encode())

    async with run_node() as node:
        row = await outbox.insert("a")
        await is_named(writer, "has locked published", node)
        await writer.commit()

        await eventually(outbox.is_empty, "the row is marked")
        assert not node.snapshot().database_losses

    assert await queue.ids(1) == [row]


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        (LOCK.format("message_parked"), "has locked message_parked"),
        (LOCK.format("message_pending"), "has locked message_pending"),
        (PARK_LOCK, "parks or releases rows"),
    ],
)
async def test_a_row_is_parked_with_those_behind_it_when_the_lock_is_gone(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode, lock: str, words: str
) -> None:
    """A lock prevents parking; the relay names the session, and parks the key's rows after the lock."""
    parked = [await outbox.insert_faulty("a"), await outbox.insert("a")]
    sent = await outbox.insert("b")
    await writer.execute(lock.encode())

    async with run_node(max_attempts=2, **NO_SWEEP) as node:
        await is_named(writer, words, node)
        await writer.commit()

        await eventually(outbox.is_empty, "every row is where it belongs")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses

    assert (await outbox.ids("parked"), await outbox.ids("sent")) == (parked, [sent])
    assert await queue.ids(1) == [sent]


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        ("LOCK TABLE outbox.message_parked IN ACCESS EXCLUSIVE MODE", "has locked message_parked"),
        (LOCK.format("message_parked"), "has locked message_parked"),
        (PARK_LOCK, "parks or releases rows"),
    ],
)
@pytest.mark.parametrize("key_policy", list(KeyPolicy))
async def test_other_rows_go_on_while_a_lock_keeps_rows_from_being_parked(
    outbox: Outbox,
    queue: Reader,
    writer: psycopg.AsyncConnection,
    run_node: RunNode,
    lock: str,
    words: str,
    key_policy: KeyPolicy,
) -> None:
    """A lock prevents parking; the rows of other keys are sent and marked meanwhile, and no attempt is lost."""
    async with run_node(key_policy=key_policy, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(lock.encode())
        faulty = [await outbox.insert_faulty("a"), await outbox.insert_faulty(None)]
        follower = await outbox.insert("a")
        sent = [follower] if key_policy is KeyPolicy.SKIP else []
        await is_named(writer, words, node)
        for key in ("b", "c", None):
            sent.append(await outbox.insert(key))
            await eventually(partial(is_marked, outbox, sent[-1]), "it is marked while the lock is held")
        pending = await outbox.connection.execute(
            "SELECT id, attempts FROM outbox.message_pending WHERE id = ANY (%s)", [faulty]
        )
        assert await pending.fetchall() == [(row, 0) for row in faulty]
        await writer.commit()

        await eventually(outbox.is_empty, "every row is where it belongs")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses
        assert node.snapshot().sweep_finds == 0

    behind = [follower] if key_policy is KeyPolicy.HOLD else []
    assert (await outbox.ids("parked"), sorted(await outbox.ids("sent"))) == ([*faulty, *behind], sorted(sent))
    assert sorted(await queue.ids(len(sent))) == sorted(sent)


async def test_a_row_that_its_owner_deletes_as_it_is_parked_does_not_free_its_key(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """The owner deletes a row that is about to be parked; its key stays parked."""
    head = await outbox.insert_faulty("a")
    async with run_node(max_attempts=1, **NO_SWEEP) as node:
        await eventually(outbox.is_empty, "it is parked")
        await writer.execute(PARK_LOCK)
        deleted = await outbox.insert("a")
        await is_named(writer, "parks or releases rows", node)
        await outbox.connection.execute("DELETE FROM outbox.message WHERE id = %s", [deleted])
        await writer.commit()
        await eventually(lambda: not node.hindrances(), "it goes on")
        follower = await outbox.insert("a")
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [head, follower]
    assert await queue.everything() == []


async def test_a_route_goes_into_quarantine_and_out_of_it_when_the_lock_is_gone(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """A lock prevents quarantine and release; the relay names the session, and does each after the lock."""
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(LOCK.format("message_quarantined").encode())
        rows = [await outbox.insert("a", exchange="later"), await outbox.insert("a")]

        await is_named(writer, "has locked message_quarantined", node)
        await writer.commit()
        await eventually(lambda: outbox.are_aside(rows), "both wait for the route")

        await writer.execute(LOCK.format("message_quarantined").encode())
        exchange = await queue.channel.declare_exchange("later", "fanout", auto_delete=True)
        await queue.queue.bind(exchange)
        await is_named(writer, "has locked message_quarantined", node)
        await writer.commit()

        await eventually(outbox.is_at_rest, "both are sent")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses

    assert await queue.ids(2) == rows


@pytest.mark.parametrize("is_known", [False, True], ids=["a new route", "a known route"])
async def test_other_rows_go_on_while_a_lock_keeps_rows_from_being_set_aside(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode, is_known: bool
) -> None:
    """A lock prevents quarantine; the rows of other keys are sent and marked meanwhile."""
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        aside = [await outbox.insert("a", exchange="", routing_key="nowhere")] if is_known else []
        await eventually(lambda: outbox.are_aside(aside), "it waits for the route")
        await writer.execute(LOCK.format("message_quarantined").encode())
        aside += [await outbox.insert(key, exchange="", routing_key="nowhere") for key in ("a", "d", None)]
        aside.append(await outbox.insert("a"))
        await is_named(writer, "has locked message_quarantined", node)
        sent = []
        for key in ("b", "c", None):
            sent.append(await outbox.insert(key))
            await eventually(partial(is_marked, outbox, sent[-1]), "it is marked while the lock is held")
        await writer.commit()

        await eventually(lambda: outbox.are_aside(aside), "all wait for the route")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses
        assert node.snapshot().sweep_finds == 0

    assert sorted(await queue.ids(len(sent))) == sent


async def test_other_rows_go_on_while_a_lock_keeps_rows_from_being_discarded(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, settings: Settings, run_node: RunNode
) -> None:
    """A lock prevents that a row is discarded; the rows of other keys are sent and marked meanwhile."""
    routes = [Route(event_type="Viewed", exchange="outbox", unroutable=Unroutable.DISCARD)]
    async with run_node(settings.model_copy(update={"routes": routes}), **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await writer.execute(LOCK.format("message_discarded").encode())
        unwanted = {"event_type": "Viewed", "exchange": "", "routing_key": "nobody"}
        gone = [await outbox.insert(key, **unwanted) for key in ("a", None)]
        follower = await outbox.insert("a")
        await is_named(writer, "has locked message_discarded", node)
        sent = await outbox.insert("b")
        await eventually(partial(is_marked, outbox, sent), "it is marked while the lock is held")
        await writer.commit()

        await eventually(outbox.is_empty, "every row is where it belongs")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses

    assert await outbox.ids("discarded") == gone
    assert await queue.ids(2) == [sent, follower]


async def test_a_relay_that_must_stop_waits_no_longer_than_its_time(
    outbox: Outbox, queue: Reader, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """A relay must stop while a lock blocks it; it ends in its time, and the row stays pending."""
    row = await outbox.insert("a", exchange="later")
    await writer.execute(LOCK.format("message_quarantined").encode())

    async with run_node(drain_timeout=1, **NO_SWEEP) as node:
        await is_named(writer, "has locked message_quarantined", node)

    # It has stopped, and the lock is still there.
    assert await outbox.ids("pending") == [row]
