"""Let consumers try held messages now, in place of waiting for the next try."""

import psycopg
from psycopg.sql import SQL, Identifier

from relay.consume.failed.held_table import CLAIM_FOR
from relay.errors import NotFoundError

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


def retry_held(connection: psycopg.Connection, schema: str, group: str | None, *, by: str, why: str) -> int:
    """Make what failed due now, of a group or all; return of how many messages. Consumers notice within seconds.

    Raises:
        NotFoundError: no message of this group is held.
    """
    values = {"group": group, "all": ALL, "by": by, "why": why, "claim": CLAIM_FOR}
    failed, changed = connection.execute(RETRY.format(schema=Identifier(schema)), values).fetchone() or (0, 0)
    if group is not None and not failed:
        raise NotFoundError(f"no message of failure group {group} is held: see `relay failures list --held`")
    return int(changed)
