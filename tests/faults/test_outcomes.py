"""If an outcome is unknown, the relay sends again with the same message_id, marks the repeat, and burns no attempt."""

from collections import defaultdict
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest
from pamqp.commands import Basic

from relay.config.settings import Settings
from relay.engine.node import Node
from tests.faults.checker import SENDING, assert_valid
from tests.faults.history import Closed, Published
from tests.faults.scene import Scene, scene
from tests.support.eventually import eventually
from tests.support.proxy import Act, Way

CONFIRM_TIMEOUT = 3.0  # seconds; what is looked at meanwhile takes less
KEYS = ("a", "b", "c")
FIRST, REPEAT = False, True  # what `x-outbox-redelivered` says

# Each leaves the message at the given place when the connection, or the patience, ends.


async def nothing_has_left(scene: Scene, node: Node) -> None:
    """The relay has no connection when it reads the rows."""
    scene.recorder.refusing = True
    scene.recorder.cut()
    await eventually(lambda: "broker" in node.hindrances(), "the loss is noticed")
    await scene.write(*KEYS)
    scene.recorder.refusing = False


async def written_and_not_read(scene: Scene, node: Node) -> None:
    """The connection is reset before the broker has read the first message."""
    scene.recorder.on_frame(Way.UP, Basic.Publish, 1, Act.RESET)
    await scene.write(*KEYS)


async def confirm_lost(scene: Scene, node: Node) -> None:
    """The broker has all messages; the connection is reset in front of the first confirm."""
    scene.recorder.hold(Way.DOWN)
    await scene.write(*KEYS)
    await eventually(lambda: scene.has_queued(len(KEYS)), "the broker has them")
    scene.recorder.cut()
    scene.recorder.release(Way.DOWN)


async def confirm_withheld(scene: Scene, node: Node) -> None:
    """The broker's answers are held for longer than `confirm_timeout`, and then released."""
    closed = scene.times(Closed)
    scene.recorder.hold(Way.DOWN)
    await scene.write(*KEYS)
    await eventually(lambda: scene.has_queued(len(KEYS)), "the broker has them")
    await eventually(lambda: scene.times(Closed) > closed, "the relay gives the connection up")
    scene.recorder.release(Way.DOWN)


@pytest.mark.parametrize(
    ("fault", "deliveries", "connections"),
    [
        (nothing_has_left, [FIRST], 1),
        (written_and_not_read, [REPEAT], 1),
        (confirm_lost, [FIRST, REPEAT], 2),
        (confirm_withheld, [FIRST, REPEAT], 2),  # another host may confirm
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_is_unknown_goes_out_again_and_says_so(
    settings: Settings,
    fault: Callable[[Scene, Node], Awaitable[None]],
    deliveries: list[bool],
    connections: int,
) -> None:
    """The outcome of a publish is unknown; the message goes out again, marked as a repeat, and burns no attempt."""
    broker = settings.broker
    if fault is confirm_withheld:
        broker = broker.model_copy(update={"confirm_timeout": CONFIRM_TIMEOUT})
    async with scene(settings.model_copy(update={"broker": broker})) as stage, stage.relay() as node:
        await fault(stage, node)
        findings = await stage.checker.ask()

    assert_valid(findings, *SENDING)
    marks: defaultdict[UUID, list[bool]] = defaultdict(list)
    for one in stage.checker.deliveries:
        marks[one.message_id].append(one.redelivered)
    assert list(marks.values()) == [deliveries] * len(KEYS)
    assert len({one.connection for one in stage.history if isinstance(one, Published)}) == connections
