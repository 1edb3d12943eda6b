"""List held messages, and let consumers try them now, in place of waiting for the next try."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

from psycopg.sql import SQL
from pydantic import Field

from relay.consume.failed.held_table import CLAIM_FOR
from relay.errors import NotFoundError
from relay.operate.asked import Closed, Group, Reasoned, check_choice
from relay.operate.operation import BULK_TIMEOUT, Effect, Role, Servers, operation
from relay.servers.postgres.tables import Tables

LIST = SQL("""
    SELECT consumer_name AS consumer, key, message_id, event_type, attempts, held_at,
        nullif(due_at, 'infinity') AS due_at, concat_ws(': ', exception, error) AS error
    FROM {schema}.held_message
    WHERE %(consumer)s::text IS NULL OR consumer_name = %(consumer)s
    ORDER BY consumer_name, key, position
    LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message that a consumer holds, without its body."""

    consumer: str
    key: str
    message_id: UUID
    event_type: str
    attempts: int  # tries that failed; 0: it waits behind an earlier one of its key
    held_at: datetime
    due_at: datetime | None  # of the next try; None: not before the earlier ones
    error: str  # of the last try


def list_held(tables: Tables, *, consumer: str | None, limit: int) -> list[HeldMessage]:
    """Return held messages, those of a key together and in its order."""
    values = {"consumer": consumer, "limit": limit}
    return tables.rows(HeldMessage, LIST, values)


# What was never tried waits behind another message of its key, and follows by itself. What a consumer has in hand keeps
# its time: it is locked, or was claimed a moment ago. One statement, so that no change lacks its note.
RETRY = SQL("""
    WITH failed AS (
        SELECT position FROM {schema}.held_message
        WHERE attempts > 0 AND (%(group)s::text IS NULL OR %(group)s = {schema}.failure_group(
            'held', {schema}.failure_cause(concat_ws(': ', exception, error)), event_type, consumer_name))
    ), free AS (
        SELECT position FROM {schema}.held_message
        WHERE position IN (SELECT position FROM failed) AND due_at > now()
            AND (begun = 0 OR due_at > now() + %(claim)s)
        FOR UPDATE SKIP LOCKED
    ), changed AS (
        UPDATE {schema}.held_message AS message SET due_at = now() FROM free WHERE message.position = free.position
        RETURNING message.position
    ), noted AS (
        INSERT INTO {schema}.operator_audit (command, target, done_by, why)
        SELECT 'held retry', coalesce(%(group)s, %(all)s), %(by)s, %(why)s WHERE EXISTS (SELECT FROM changed)
    )
    SELECT (SELECT count(*) FROM failed), (SELECT count(*) FROM changed)
""")
ALL = "all"  # the target in the audit when no group is named


def retry_held(tables: Tables, group: str | None, *, by: str, why: str) -> int:
    """Make what failed due now, of a group or all; return of how many messages. Consumers notice within seconds.

    Raises:
        NotFoundError: no message of this group is held.
    """
    values = {"group": group, "all": ALL, "by": by, "why": why, "claim": CLAIM_FOR}
    failed, changed = tables.one(RETRY, values)
    if group is not None and not failed:
        raise NotFoundError(f"no message of failure group {group} is held: see `relay failures list --held`")
    return int(changed)


class RetryHeld(Reasoned):
    """Which messages to try now, and why."""

    group: Group = None
    all: Annotated[bool, Field(description="Of every group; needed when no group is given.")] = False


class Retried(Closed):
    """How many messages are due now; what waits behind them follows."""

    messages: int


@operation("held.retry", "POST /held/retry", Role.OPERATOR, Effect.STORED)
def retry(at: Servers, asked: RetryHeld) -> Retried:
    """Let the consumers try what failed now, in place of waiting for the next try."""
    check_choice(is_filtered=asked.group is not None, is_all=asked.all)
    with at.connect(BULK_TIMEOUT) as tables:
        return Retried(messages=retry_held(tables, asked.group, by=at.by, why=asked.why))
