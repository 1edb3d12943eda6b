"""Let parked rows go: send them again, or give them up.

An operator who retries or discards a head lets the rows behind it go. But if another parked row of their key stands in
front of them, they wait on behind that one. So the order of a key outlives every choice of an operator.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL, Composed

from relay.errors import OutboxError, PartlyDoneError
from relay.operate.parked import Selection, composed, scalar
from relay.operate.whereabouts import whereabouts
from relay.replay.job import operator

BATCH_HEADS = 500  # a transaction; a head goes with all that is held behind it, however many

# Everyone who parks, holds, retries or discards takes this lock first, so that no row is held behind one
# that is just being let go.
TAKE_LOCK = SQL("SELECT pg_advisory_xact_lock(hashtextextended({name}, 0))")
RING = SQL("SELECT pg_notify({name}, '')")


# What becomes of the rows of the keys of `heads`. `remaining` is the first head of the key that stays parked;
# a row is free when what it waited behind goes. One pass over the key's rows: held rows may be many.
FATES = SQL("""
    SELECT id, remaining, remaining IS NULL OR id < remaining AS goes
    FROM (
        SELECT row.id, row.held_behind, {is_head} AS is_head,
               min(row.id) FILTER (WHERE {is_head} AND row.id <> ALL (%(heads)s::bigint[]))
                   OVER (PARTITION BY row.aggregate_type, row.aggregate_id) AS remaining
        FROM {schema}.message_state AS row
        JOIN (SELECT DISTINCT aggregate_type, aggregate_id
              FROM {schema}.message_state
              WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])) AS key
            ON row.aggregate_type = key.aggregate_type AND row.aggregate_id = key.aggregate_id
        WHERE row.state = 'parked'
    ) AS held
    WHERE NOT is_head
      AND (remaining IS NULL OR held_behind < remaining OR held_behind = ANY (%(heads)s::bigint[]))
""")


@dataclass(frozen=True, slots=True)
class Done:
    """What a retry or discard did, or would do."""

    chosen: int  # heads retried or discarded
    released: int  # rows let go behind them
    not_found: list[str]  # what was named and is no head of parked rows, with the reason


READ_HEADS = SQL("""
    SELECT row.id FROM {schema}.message_state AS row
    WHERE {matches} AND {is_head} AND row.id > %(after)s
      AND coalesce(row.parked_at, row.created_at) <= %(until)s::timestamptz
    ORDER BY row.id
    LIMIT %(batch)s
""")
COUNT_RELEASED = SQL("SELECT count(*) FROM ({fates}) AS fate WHERE goes")
NOW = SQL("SELECT clock_timestamp()")


def preview(connection: psycopg.Connection, schema: str, selection: Selection) -> Done:
    """Return exactly what `retry` or `discard` would do now; changes nothing."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        parameters = {**asdict(selection), "after": 0, "until": scalar(connection, NOW), "batch": selection.limit}
        heads = [row[0] for row in connection.execute(composed(schema, READ_HEADS), parameters)]
        released = scalar(connection, _with_fates(schema, COUNT_RELEASED), {"heads": heads})
        return Done(len(heads), released, _not_found(connection, schema, selection))


RETRY_HEADS = SQL("""
    WITH retried AS (
        UPDATE {schema}.message
        SET state = 'pending', attempts = 0, available_at = now(), held_behind = NULL, last_error = NULL,
            parked_at = NULL
        WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'parked retry', id::text, %(by)s, %(why)s FROM retried
""")


def retry(
    connection: psycopg.Connection, schema: str, selection: Selection, *, by: str | None = None, why: str | None = None
) -> Done:
    """Make the selected heads and what is held behind them pending again, with all their attempts.

    Who did so and why is noted for each head in the table `operator_audit`; `by`: as `operator` takes it.

    Works in batches of one transaction each. Rows parked after the start are left alone, so it ends
    also when a relay parks them again at once.

    Raises:
        PartlyDoneError: the database failed after some batches; these stay done.
    """
    words = {"by": operator(by), "why": why}
    return _change(
        connection, schema, selection, lambda heads: connection.execute(composed(schema, RETRY_HEADS), heads | words)
    )


DISCARD_HEADS = SQL("""
    WITH discarded AS (
        UPDATE {schema}.message
        SET state = 'discarded', held_behind = NULL, last_error = concat_ws('; ', last_error, %(words)s::text)
        WHERE state = 'parked' AND id = ANY (%(heads)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'parked discard', id::text, %(by)s, %(why)s FROM discarded
""")


def discard(connection: psycopg.Connection, schema: str, selection: Selection, *, by: str, why: str) -> Done:
    """Discard the selected heads and release what is held behind them; the rows are kept as `discarded`.

    Who did so and why is added to the reason of each row, and noted in the table `operator_audit`.

    Raises:
        PartlyDoneError: the database failed after some batches; these stay done.
    """
    words = {"words": f"discarded by {by}: {why}", "by": by, "why": why}
    return _change(
        connection, schema, selection, lambda heads: connection.execute(composed(schema, DISCARD_HEADS), heads | words)
    )


HOLD_BEHIND_REMAINING = SQL("""
    WITH fate AS MATERIALIZED ({fates})
    UPDATE {schema}.message AS row
    SET held_behind = fate.remaining, last_error = 'waits behind message ' || fate.remaining
    FROM fate
    WHERE row.state = 'parked' AND row.id = fate.id AND NOT fate.goes
""")
RELEASE = SQL("""
    WITH fate AS MATERIALIZED ({fates})
    UPDATE {schema}.message AS row
    SET state = 'pending', attempts = 0, available_at = now(), held_behind = NULL, last_error = NULL, parked_at = NULL
    FROM fate
    WHERE row.state = 'parked' AND row.id = fate.id AND fate.goes
""")


def _change(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    change_heads: Callable[[dict[str, Any]], object],
) -> Done:
    not_found = _not_found(connection, schema, selection)
    until = scalar(connection, NOW)
    chosen = released = after = 0
    while (batch := min(BATCH_HEADS, (selection.limit or chosen + BATCH_HEADS) - chosen)) > 0:
        try:
            with connection.transaction():
                connection.execute(TAKE_LOCK.format(name=f"{schema}.park"))
                parameters = {**asdict(selection), "after": after, "until": until, "batch": batch}
                heads = [row[0] for row in connection.execute(composed(schema, READ_HEADS), parameters)]
                if not heads:
                    break
                connection.execute(_with_fates(schema, HOLD_BEHIND_REMAINING), {"heads": heads})
                let_go = connection.execute(_with_fates(schema, RELEASE), {"heads": heads}).rowcount
                change_heads({"heads": heads})
                connection.execute(RING.format(name=f"{schema}.doorbell"))
        except (psycopg.Error, OutboxError) as error:
            if not chosen:
                raise
            raise PartlyDoneError(f"{chosen} rows are done, the others stay parked: {error}") from error
        chosen, released, after = chosen + len(heads), released + let_go, heads[-1]
    return Done(chosen, released, not_found)


READ_NOT_FOUND = SQL("""
    SELECT given.id, given.message_id, row.held_behind
    FROM unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]) AS given (id, message_id)
    LEFT JOIN {schema}.message_state AS row
        ON row.state = 'parked' AND (row.id = given.id OR row.message_id = given.message_id)
    WHERE row.id IS NULL OR NOT {is_head}
""")


def _not_found(connection: psycopg.Connection, schema: str, selection: Selection) -> list[str]:
    named = {"ids": selection.ids or [], "message_ids": selection.message_ids or []}
    rows = connection.execute(composed(schema, READ_NOT_FOUND), named).fetchall()
    lacking = {id_ or message_id: behind for id_, message_id, behind in rows}
    elsewhere = whereabouts(connection, schema, [each for each, behind in lacking.items() if behind is None])
    return [
        f"{each} is held behind {behind}: choose that one" if behind else f"{each} is not parked: {elsewhere[each]}"
        for each, behind in lacking.items()
    ]


def _with_fates(schema: str, statement: SQL) -> Composed:
    return composed(schema, statement, fates=composed(schema, FATES))
