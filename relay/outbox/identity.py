"""By which id an inbox knows an event whose writer is known."""

from hashlib import sha256
from uuid import UUID


def id_of_writer(message_id: UUID, writer: str) -> UUID:
    """Return the id by which an inbox with `scope="writer"` knows a message: a hash that no writer can aim at.

    `relay.consume.apply.inbox.ID_OF_WRITER` computes the same in SQL; tests/consume/test_scope.py compares them.
    """
    return UUID(bytes=sha256(message_id.bytes + writer.encode()).digest()[:16])
