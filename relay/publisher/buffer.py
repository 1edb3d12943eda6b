"""What the publisher needs of a buffer."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from relay.engine.row import Row
from relay.engine.send.publisher import Publisher
from relay.publisher.entry import Unaccepted


class BufferedRows(NamedTuple):
    """The rows of a publisher that are in its buffer."""

    waiting: int  # for their turn
    stuck: int  # refused, or behind one that was


class Buffer(Protocol):
    """Where events wait that the broker does not take: what was written there outlives this process.

    Rows of one key are sent in the order in which they were written.
    """

    @property
    def reasons(self) -> Sequence[str]:
        """Return why it cannot be written, or what in it cannot be sent; nothing when all is well."""

    @property
    def written_as(self) -> bytes:
        """Return the role that its rows would be written as, so that a message sent directly names it, too."""

    @property
    def publisher(self) -> Publisher | None:
        """Sends its rows, if that is ours to do and by the same link."""

    def lets_go(self, row: Row) -> bool:
        """Whether nothing is kept of a row that no queue is bound for, by the `unroutable` of its route."""

    async def open(self) -> None:
        """Make it ready; raises OutboxError when it cannot be a buffer."""

    async def close(self) -> None: ...

    async def write(self, entries: Sequence[Unaccepted]) -> None:
        """Commit these, in this order.

        Raises:
            NotAcceptedError: it could not; or it did, and could not say so.
        """

    async def left(self) -> BufferedRows:
        """Count what is there of this publisher.

        Raises:
            OutboxError: it does not answer.
        """

    async def run(self) -> None:
        """Drain it, if that is ours to do; return when told to stop and what is in flight is settled."""

    def stop(self) -> None:
        """Drain no more."""
