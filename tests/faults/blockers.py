"""Sessions whose locks block the relay."""

import psycopg

from relay.engine.node import Node
from tests.support.eventually import eventually


async def is_named(blocker: psycopg.AsyncConnection, does: str, node: Node) -> None:
    """Wait until the relay names the session that blocks it."""
    words = f"session {blocker.info.backend_pid} {does}"
    await eventually(lambda: words in node.hindrances().get("database", ""), f"it says: {words}")
