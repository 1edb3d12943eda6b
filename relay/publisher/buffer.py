"""The interface of a buffer, as the publisher uses it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from relay.engine.row import Row
from relay.engine.send.sender import Sender
from relay.publisher.entry import Entry


class Left(NamedTuple):
    """The counts of a publisher's rows in its buffer."""

    waiting: int  # rows that wait for their turn
    stuck: int  # rows that were refused, or that wait behind a refused one


class Buffer(Protocol):
    """Where events wait while the broker does not take them. Written events outlive this process.

    Rows of one key are sent in the order in which they were written.
    """

    @property
    def reasons(self) -> Sequence[str]:
        """Return why the buffer cannot be written, and which rows cannot be sent; empty when all is well."""

    @property
    def written_as(self) -> bytes:
        """Return the role that writes the buffer's rows, so that a message sent directly names it, too."""

    @property
    def publisher(self) -> Sender | None:
        """Return the sender of its rows; None unless this process sends them, and by the same link."""

    def lets_go(self, row: Row) -> bool:
        """Whether an unroutable row counts as sent, by the `unroutable` of its route, and nothing of it is kept."""

    async def open(self) -> None:
        """Open the buffer; raises OutboxError when it cannot be used."""

    async def close(self) -> None: ...

    async def write(self, entries: Sequence[Entry]) -> None:
        """Commit these entries, in this order.

        Raises:
            NotAcceptedError: the commit failed, or its answer was lost.
        """

    async def left(self) -> Left:
        """Count the rows of this publisher.

        Raises:
            OutboxError: the buffer does not answer.
        """

    async def run(self) -> None:
        """Drain the buffer, if this process does that, until `stop` is called and the rows in flight are settled."""

    def stop(self) -> None:
        """Stop draining."""
