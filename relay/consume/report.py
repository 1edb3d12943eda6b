"""What is said of a message that failed."""

from traceback import format_tb

from relay.consume.classify import Failure
from relay.consume.message import Delivery
from relay.logger import get_logger

log = get_logger("relay.consume")


def tell_failure(delivery: Delivery, failure: Failure, error: BaseException) -> None:
    log.warning(
        "message.failed",
        message_id=str(delivery.message.message_id),
        type=delivery.message.type,
        key=delivery.key,
        attempts=failure.attempts,
        retry_in_s=round(failure.wait, 3) if failure.reason is None else None,
        error=f"{failure.exception}: {failure.words}",
        # Where, without values: a traceback of structlog's default shows every local variable, payloads too.
        traceback="".join(format_tb(error.__traceback__)) if failure.attempts == 1 else None,
    )
