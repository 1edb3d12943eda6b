"""Held messages that nobody tries: a consumer of another kind held them under this name, and keys with them."""

from relay.consume.apply.fence import NO_PARTITION
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import Session
from relay.logger import get_logger

log = get_logger("relay.consume")

LEFT_BEHIND = """
    SELECT count(*) FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND NOT (%(holds)s AND (partition = %(no_partition)s) = NOT %(by_partition)s)
"""


async def tell_left_behind(inbox: Inbox, session: Session, *, holds: bool, by_partition: bool = False) -> None:
    """Look once for what this consumer will not try.

    Args:
        holds: it keeps the order per key, and so tries what it has held.
        by_partition: it is a member of a pool.
    Raises:
        DatabaseUnavailableError: no answer.
    """
    own = {
        "consumer": inbox.consumer_name,
        "holds": holds,
        "by_partition": by_partition,
        "no_partition": NO_PARTITION,
    }
    ((count,),) = await session.run(inbox.statement(LEFT_BEHIND), own)
    if count:
        log.error(
            "messages.left_behind",
            consumer=inbox.consumer_name,
            messages=count,
            reason="they were held with another order or another kind of consumer, and this one does not try them: "
            "run it as it was until none is held, or delete them",
        )
