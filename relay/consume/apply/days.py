"""The days of an inbox that are missing: made when a message of them comes, within the bounds of ensure_inbox_days."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date

from psycopg import errors

from relay.consume.message import NO_DAY, Delivery
from relay.errors import ExpiredMessageError, MisdatedMessageError

MAKE_DAYS = "SELECT {schema}.ensure_inbox_days(day, 1) FROM unnest(%(days)s::date[]) AS day"

LAST_DAY = "inbox_last_day"  # the name that ensure_inbox_days gives to its bound (migrations/versions/0011_rights.py)


def lacks_day(error: errors.CheckViolation, schema: str) -> bool:
    """Tell whether it is our INSERT that has found no partition, and not a constraint of somebody's table."""
    diag = error.diag
    return (diag.schema_name, diag.table_name, diag.constraint_name) == (schema, "processed_message", None)


def days_of(batch: Sequence[Delivery]) -> list[date]:
    """Give the days for which there may be no partition yet."""
    return sorted({delivery.message.day for delivery in batch} - {NO_DAY})


@contextmanager
def refused_day_named(batch: Sequence[Delivery]) -> Iterator[None]:
    """Let the refusal of a day name the message that is of it.

    Raises:
        ExpiredMessageError: the inbox has forgotten the day, so the message cannot be told from one that was applied.
        MisdatedMessageError: the day is further ahead than clocks differ.
    """
    try:
        yield
    except errors.ObjectNotInPrerequisiteState as error:
        bound = date.fromisoformat(error.diag.message_detail or "")
        if error.diag.constraint_name == LAST_DAY:
            message = next(each.message for each in batch if each.message.day > bound)
            raise MisdatedMessageError(message.type, message.message_id, message.day, bound) from None
        message = next(each.message for each in batch if NO_DAY < each.message.day < bound)
        raise ExpiredMessageError(message.type, message.message_id, message.day, bound) from None
