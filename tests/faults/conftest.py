"""The drills in one process use the engine's fixtures: a table, a queue bound to what the relay sends, a node."""

from tests.engine.conftest import channel, outbox, queue, run_node, writer

__all__ = ["channel", "outbox", "queue", "run_node", "writer"]
