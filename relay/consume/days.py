"""The days of an inbox that are missing: made when a message of them comes, unless they are forgotten."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date

from psycopg import errors

from relay.consume.message import NO_DAY, Delivery
from relay.errors import ExpiredMessageError

MAKE_DAYS = "SELECT {schema}.ensure_inbox_days(day, 1) FROM unnest(%(days)s::date[]) AS day"


def lacks_day(error: errors.CheckViolation, schema: str) -> bool:
    """Tell whether it is our INSERT that has found no partition, and not a constraint of somebody's table."""
    diag = error.diag
    return (diag.schema_name, diag.table_name, diag.constraint_name) == (schema, "processed_message", None)


def days_of(batch: Sequence[Delivery]) -> list[date]:
    """Give the days for which there may be no partition yet."""
    return sorted({delivery.message.day for delivery in batch} - {NO_DAY})


@contextmanager
def expiry_named(batch: Sequence[Delivery]) -> Iterator[None]:
    """Let the refusal of a day that the inbox has forgotten name the message.

    Raises:
        ExpiredMessageError: it cannot be told from one that was applied.
    """
    try:
        yield
    except errors.ObjectNotInPrerequisiteState as error:
        since = date.fromisoformat(error.diag.message_detail or "")
        message = next(each.message for each in batch if NO_DAY < each.message.day < since)
        raise ExpiredMessageError(message.type, message.message_id, message.day, since) from None
