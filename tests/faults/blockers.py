"""Sessions whose locks are in the relay's way."""

import psycopg

from relay.engine.node import Node
from tests.support.eventually import eventually


async def is_named(blocker: psycopg.AsyncConnection, does: str, node: Node) -> None:
    """Wait until the relay names the session that is in its way."""
    words = f"session {blocker.info.backend_pid} {does}"
    await eventually(lambda: words in node.hindrances().get("database", ""), f"it says: {words}")
