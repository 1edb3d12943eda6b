"""The consumer of docs/consume-elsewhere.md, which is not ours: each message has its effect once, in order per key."""

import sys
from collections.abc import Mapping
from pathlib import Path

from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, RunNode
from tests.examples.elsewhere import drill_totals
from tests.prose.pages import programs

(PROGRAM,) = programs("docs/consume-elsewhere.md")


async def test_each_message_has_its_effect_once_and_in_order_through_kills(
    outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode, tmp_path: Path
) -> None:
    def start(environment: Mapping[str, str]) -> Process:
        return Process([sys.executable, "-c", PROGRAM], log=tmp_path / "log", environment=environment)

    await drill_totals(start, outbox, channel, settings, run_node)
