"""The relay is killed between any two steps of a message; the next one delivers it, and repeats only what it must.

A test reaches the moment from outside: it holds back what the relay waits for, and kills the relay.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from pamqp.commands import Basic
from yarl import URL

from relay.config.settings import Settings
from tests.faults.checker import SENDING, assert_valid
from tests.faults.history import Injected
from tests.faults.scene import Scene, scene
from tests.faults.victim import Victim, relay_victim
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy, Way

MARK = b"message_sent ("  # in no other statement of the relay
OF_LANES = b'LISTEN "outbox.nodes"'  # said by the session of the lanes alone

IN_MARK = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%message_sent (%'
"""


class Statements(FaultProxy):
    """A proxy between relay and database that reads the session of the lanes.

    `stop_mark` holds the relay's statements from its next mark on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, amqp=False)
        self.mark_stopped = asyncio.Event()
        self.is_unanswered = False  # the last statement
        self._stops_mark = self._prepared = False
        self._of_lanes = -1  # the connection

    def stop_mark(self) -> None:
        self._stops_mark = True

    def comes(self, connection: int, way: Way, data: bytes) -> None:
        if way is Way.UP and OF_LANES in data:
            self._of_lanes = connection
        if way is Way.DOWN or connection != self._of_lanes:
            return
        self.is_unanswered = True
        if self._prepared and self._stops_mark:  # the statement's text is prepared first, alone
            self._stops_mark = False
            self.hold(Way.UP)
            self.mark_stopped.set()
        self._prepared = MARK in data

    def passes(self, connection: int, way: Way, data: bytes) -> None:  # noqa: ARG002 - the proxy calls it so
        if way is Way.DOWN and connection == self._of_lanes:
            self.is_unanswered = False


@dataclass(slots=True)
class Killing:
    """A relay process behind two proxies, which can hold its traffic to both servers."""

    scene: Scene
    statements: Statements
    relay: Victim

    async def end(self) -> None:
        """Kill the relay sooner than a mark gives up its lock; the proxies keep what they hold."""
        self.relay.tell(signal.SIGKILL)
        await eventually(lambda: not self.relay.is_running(), "it is dead")

    async def kill(self) -> None:
        """Kill the relay, and drop what the proxies hold."""
        await asyncio.to_thread(self.relay.stop, signal.SIGKILL)
        self.scene.history.append(Injected("relay killed", forgets=True))
        for proxy in (self.scene.recorder, self.statements):
            proxy.cut()
            for way in Way:
                proxy.release(way)


async def when_read(killing: Killing) -> None:
    """Both rows are read, by one statement; the first publish is stopped before the broker."""
    recorder = killing.scene.recorder
    recorder.on_frame(Way.UP, Basic.Publish, 1, Act.HOLD)
    await killing.scene.write("a", "a")
    await recorder.wait_seen(Way.UP, Basic.Publish, 1)
    await killing.kill()


async def when_sent(killing: Killing) -> None:
    """The broker has them; no confirm has come back."""
    killing.scene.recorder.hold(Way.DOWN)
    await killing.scene.write("a", "b")
    await eventually(lambda: killing.scene.has_queued(2), "the broker has them")
    await killing.kill()


async def when_confirmed(killing: Killing) -> None:
    """The confirm was taken, as the successor shows; the session is busy, so the mark is not begun."""
    recorder, statements = killing.scene.recorder, killing.statements
    recorder.hold(Way.DOWN)
    await killing.scene.write("a", "a")
    await recorder.wait_seen(Way.DOWN, Basic.Ack, 1)
    statements.hold(Way.DOWN)
    await eventually(lambda: statements.is_unanswered, "the session waits for an answer")
    recorder.release(Way.DOWN)
    await eventually(lambda: killing.scene.has_queued(2), "the successor is sent")
    await killing.kill()


async def before_the_mark(killing: Killing) -> None:
    """The statement has left the relay and not reached the database."""
    killing.statements.stop_mark()
    await killing.scene.write("a")
    async with asyncio.timeout(20):
        await killing.statements.mark_stopped.wait()
    await killing.kill()


async def inside_a_mark_that_is_made(killing: Killing) -> None:
    """The statement waits for a row's lock; it is made after the relay's death."""
    async with locked_rows(killing.scene):
        await killing.end()
        assert not await killing.scene.is_empty()
    await eventually(killing.scene.is_empty, "the mark is made")
    await killing.kill()


async def inside_a_mark_that_is_undone(killing: Killing) -> None:
    """The statement waits for a row's lock, and its session ends."""
    async with locked_rows(killing.scene):
        await killing.end()
        ended = await killing.scene.connection.execute(f"SELECT pg_terminate_backend(pid) FROM ({IN_MARK}) AS mark")
        assert ended.rowcount == 1
        await eventually(lambda: is_marking(killing.scene, no=True), "the session is gone")
    await killing.kill()


async def after_the_mark(killing: Killing) -> None:
    """The mark is committed; the answer has not come back."""
    statements = killing.statements
    statements.stop_mark()
    await killing.scene.write("a")
    async with asyncio.timeout(20):
        await statements.mark_stopped.wait()
    statements.hold(Way.DOWN)
    statements.release(Way.UP)
    await eventually(killing.scene.is_empty, "it is marked")
    await killing.kill()


@pytest.mark.parametrize(
    ("moment", "times"),
    [
        (when_read, [1, 1]),
        (when_sent, [2, 2]),
        (when_confirmed, [2, 2]),
        (before_the_mark, [2]),
        (inside_a_mark_that_is_made, [1]),
        (inside_a_mark_that_is_undone, [2]),
        (after_the_mark, [1]),
    ],
    ids=lambda value: getattr(value, "__name__", "times"),
)
async def test_killed_at_any_moment_it_loses_and_reorders_nothing(
    settings: Settings, tmp_path: Path, moment: Callable[[Killing], Awaitable[None]], times: list[int]
) -> None:
    """The relay is killed between two steps of a message; the next one loses nothing, and repeats only what it must."""
    async with started(settings, tmp_path) as killing:
        await moment(killing)
        await killing.relay.start()

        findings = await killing.scene.checker.ask()

        assert await asyncio.to_thread(killing.relay.stop, signal.SIGTERM) == 0
        assert_valid(findings, *SENDING)
        deliveries = Counter(one.outbox_id for one in killing.scene.checker.deliveries)
        assert [count for _, count in sorted(deliveries.items())] == times


@asynccontextmanager
async def started(settings: Settings, logs: Path) -> AsyncIterator[Killing]:
    """Yield a relay between two proxies; the process ends with the block."""
    database_url = URL(settings.database.url.get_secret_value())
    async with scene(settings) as stage, Statements(str(database_url.host), database_url.port or 5432) as statements:
        through = str(database_url.with_port(statements.port))
        relay = relay_victim(through, stage.settings.broker.url.get_secret_value(), logs)
        try:
            await relay.start()
            yield Killing(stage, statements, relay)
        finally:
            await asyncio.to_thread(relay.stop, signal.SIGKILL)


@asynccontextmanager
async def locked_rows(scene: Scene) -> AsyncIterator[None]:
    """Confirm a message while its row is locked, and wait until the mark waits for the lock."""
    scene.recorder.hold(Way.DOWN)
    await scene.write("a")
    async with await psycopg.AsyncConnection.connect(scene.settings.database.url.get_secret_value()) as connection:
        await connection.execute("SELECT FROM outbox.message_pending FOR UPDATE")
        scene.recorder.release(Way.DOWN)
        await eventually(lambda: is_marking(scene), "the mark waits for the lock")
        yield


async def is_marking(scene: Scene, *, no: bool = False) -> bool:
    return ((await scene.connection.execute(IN_MARK)).rowcount == 0) is no
