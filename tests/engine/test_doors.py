"""The files that a newcomer opens to follow one row from INSERT to sent."""

from tests.doors import doors
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


async def test_a_row_passes_through_thirteen_files(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    async def passage() -> None:
        await outbox.insert()
        await eventually(outbox.is_empty, "the row is sent")

    async with run_node(heartbeat_interval=5.0) as node:
        await eventually(node.is_ready, "the relay is ready")
        opened = await doors("relay/engine", passage)

    assert sorted(opened) == [
        "relay/engine/loop.py",
        "relay/engine/node.py",
        "relay/engine/read/ahead.py",
        "relay/engine/read/positions.py",
        "relay/engine/read/tail.py",
        "relay/engine/row.py",
        "relay/engine/send/frames.py",
        "relay/engine/send/publisher.py",
        "relay/engine/send/refusals.py",
        "relay/engine/send/repeats.py",
        "relay/engine/session/session.py",
        "relay/engine/settle/mark.py",
        "relay/engine/settle/quarantine.py",
    ]
