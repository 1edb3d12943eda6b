"""Transactional outbox relay: from PostgreSQL to RabbitMQ, at least once, in order per key."""

from importlib.metadata import version

__version__ = version("outbox-relay")
