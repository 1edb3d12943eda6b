"""Transactional outbox relay: from PostgreSQL to RabbitMQ, at least once, in order per key."""

from typing import TYPE_CHECKING

__version__: str

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Look the version up when it is asked for: that takes longer than a command takes to hear signals."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version  # noqa: PLC0415

        found = globals()["__version__"] = version("outbox-relay")
        return found
