"""Answer for the log, too: `message_count`, `message_state` and `sent` read rows and receipts as they read days.

A row of the log is `sent` by its receipt and `pending` without one, whatever its column `state` says. `message_state`
has one more column, `block`: NULL, or the block of 4,096 ids of a receipt of the log. By it `sent` goes from the
receipts of a time to their rows.

`cover_segment` counts the rows of a segment that the relay has passed and no receipt names. It must find no such row.

`drop_sent_day` compares the archive of a day with all of its rows, as `empty_segment` does. They are the rows of its
table, the rows of the log, and the rows that have left.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on the two views for an instant; it waits for statements that read them.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

COLUMNS = (
    *("id", "message_id", "aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "headers"),
    *("content_type", "payload", "payload_bytes", "created_at", "lane", "state", "attempts", "available_at"),
    *("last_error", "held_behind", "parked_at", "sent_at", "writer", "batch_id", "trace_context", "quarantine"),
)
# What a row of the log cannot have: it moves out of the log first. As constants, so that the planner leaves out the log
# where rows that were refused are sought.
IN_LOG = {
    "attempts": "0::smallint",
    "last_error": "NULL::text",
    "held_behind": "NULL::bigint",
    "parked_at": "NULL::timestamptz",
    "quarantine": "NULL::bigint",
}
LANES = "'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'"  # all: an index by lane and id is then used by id alone

# Where to look for rows without a receipt. Each lane begins at its last checkpoint. Above it one hash compares rows
# with the names in receipts: to look into the receipts for each row costs up to 0.3 ms. At or below it are only
# those rows that its snapshot could not see. They are found by the BRIN, and looked up by block. Without a checkpoint
# of this cluster, every row is compared.
# A range of xid, not `>=`: the planner takes a range whose ends it does not know for narrow. It would rather read the
# log than the BRIN otherwise. `OFFSET 0`: the planner would join lanes and rows by a hash of all rows.
PENDING = """
CREATE VIEW {schema}.log_position AS
    SELECT lane::smallint, coalesce(low, -9223372036854775808) AS low, seen_to, unseen
    FROM generate_series(0, 15) AS lane
    LEFT JOIN LATERAL (
        SELECT lows[array_position(lanes, lane::smallint)] AS low, seen_to, unseen
        FROM {schema}.checkpoint
        WHERE lane::smallint = ANY (lanes) AND cluster = (SELECT system_identifier FROM pg_control_system())
        ORDER BY number DESC
        LIMIT 1
    ) AS last ON true;

CREATE VIEW {schema}.log_named AS
    SELECT unnest(ids) AS id FROM {schema}.receipt WHERE block >= (SELECT min(low) >> 12 FROM {schema}.log_position);

CREATE VIEW {schema}.log_late AS
    SELECT row.*
    FROM (
        SELECT * FROM {schema}.message_log
        WHERE xid BETWEEN (
            SELECT min(least(seen_to, (SELECT min(xid) FROM unnest(unseen) AS xid))) FROM {schema}.log_position
        ) AND 9223372036854775806 AND id <= (SELECT max(low) FROM {schema}.log_position)
        OFFSET 0
    ) AS row
    JOIN {schema}.log_position AS base ON row.lane = base.lane AND row.id <= base.low
        AND (row.xid >= base.seen_to OR row.xid = ANY (base.unseen))
    WHERE NOT EXISTS (SELECT FROM {schema}.receipt WHERE block = row.id >> 12 AND row.id = ANY (ids));

CREATE VIEW {schema}.log_pending AS
    SELECT row.*
    FROM {schema}.log_position AS base CROSS JOIN LATERAL (
        SELECT * FROM {schema}.message_log WHERE lane = base.lane AND id > base.low OFFSET 0
    ) AS row
    WHERE NOT EXISTS (SELECT FROM {schema}.log_named AS named WHERE named.id = row.id)
    UNION ALL
    SELECT * FROM {schema}.log_late;

-- Since when messages wait: one that is delayed, once it is due. The first of each lane stands for its lane, as ids and
-- times of writing run together but for transactions that overlap.
CREATE VIEW {schema}.message_waits AS
    SELECT front.since
    FROM generate_series(0, 15) AS one (number)
    CROSS JOIN LATERAL (
        SELECT created_at AS since
        FROM {schema}.message_pending AS row
        WHERE row.lane = one.number::smallint AND row.available_at IS NULL
        ORDER BY row.id
        LIMIT 1
    ) AS front
    UNION ALL (
        SELECT available_at FROM {schema}.message_pending WHERE available_at <= now() ORDER BY available_at LIMIT 1
    )
    UNION ALL
    SELECT front.since
    FROM {schema}.log_position AS base
    CROSS JOIN LATERAL (
        SELECT coalesce(available_at, created_at) AS since
        FROM {schema}.message_log AS row
        WHERE row.lane = base.lane AND row.id > base.low AND (available_at IS NULL OR available_at <= now())
            AND row.id NOT IN (SELECT unnest(ARRAY(SELECT id FROM {schema}.log_named)))
        ORDER BY row.id
        LIMIT 1
    ) AS front
    UNION ALL
    SELECT coalesce(available_at, created_at) FROM {schema}.log_late
    WHERE available_at IS NULL OR available_at <= now();
"""

# Both parts of a state are counted below one aggregate, so that the planner leaves out a state that nobody asks for.
# What left with its day or its segment counts no more.
COUNT = """
CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, sum(part.messages)::bigint AS messages FROM (
        SELECT count(*) AS messages FROM {schema}.message_pending
        UNION ALL SELECT count(*) FROM {schema}.log_pending
    ) AS part
    UNION ALL SELECT 'sent', sum(part.messages)::bigint FROM (
        SELECT count(*) AS messages FROM {schema}.message WHERE state = 'sent'
        UNION ALL SELECT coalesce(sum(n), 0) FROM {schema}.receipt
    ) AS part
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
"""

# Each part is a table with a constant as its state, so that the planner leaves out parts and still reads by index.
STATE = """
CREATE OR REPLACE VIEW {schema}.message_state AS
    SELECT {pending}, NULL::bigint AS block FROM {schema}.message_pending AS row
    UNION ALL SELECT {parked}, NULL::bigint FROM {schema}.message_parked AS row
    UNION ALL SELECT {quarantined}, NULL::bigint FROM {schema}.message_quarantined AS row
    UNION ALL SELECT {discarded}, NULL::bigint FROM {schema}.message_discarded AS row
    UNION ALL SELECT {sent}, NULL::bigint FROM {schema}.message_sent AS row
    UNION ALL SELECT {log_pending}, NULL::bigint FROM {schema}.log_pending AS row
    UNION ALL SELECT {log_sent}, receipt.block
        FROM {schema}.receipt CROSS JOIN LATERAL unnest(ids) AS named (id)
        JOIN {schema}.message_log AS row ON row.id = named.id AND lane = ANY ({lanes});
"""

# By block: a hash of one block's names, and its rows by the index of one segment. `OFFSET 0` keeps the planner from
# another order. It would hash all names of that time and read all segments.
# `sent_blocks` has the owner's rights, as the views: the right to read `message_state` is enough for `sent`.
SENT = """
CREATE FUNCTION {schema}.sent_blocks(since timestamptz, until timestamptz) RETURNS SETOF bigint
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp ROWS 100
BEGIN ATOMIC
    SELECT DISTINCT block FROM {schema}.receipt WHERE sent_at >= since AND sent_at < until;
END;

CREATE OR REPLACE FUNCTION {schema}.sent(since timestamptz, until timestamptz) RETURNS SETOF {schema}.message_state
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT * FROM {schema}.message_state
    WHERE state = 'sent' AND block IS NULL AND sent_at >= since AND sent_at < until
    UNION ALL
    SELECT of_block.* FROM {schema}.sent_blocks(since, until) AS named (block) CROSS JOIN LATERAL (
        SELECT * FROM {schema}.message_state
        WHERE state = 'sent' AND block = named.block AND id >= named.block << 12 AND id < named.block + 1 << 12
            AND sent_at >= since AND sent_at < until
        OFFSET 0
    ) AS of_block;
END;
"""

# The function of migration 0011, with two changes. Rows of the day that lie elsewhere count as archived. The rows that
# leave with the table are noted, as those that leave with a segment.
DROP_DAY = """
CREATE FUNCTION {schema}.rows_elsewhere(day date) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(sum(n), 0)::bigint + coalesce((
        SELECT emptied FROM {schema}.archived_day AS noted WHERE noted.day = rows_elsewhere.day
    ), 0)
    FROM {schema}.receipt
    WHERE sent_at >= rows_elsewhere.day::timestamp AT TIME ZONE 'UTC'
        AND sent_at < (rows_elsewhere.day + 1)::timestamp AT TIME ZONE 'UTC'
$$;
REVOKE EXECUTE ON FUNCTION {schema}.rows_elsewhere(date) FROM PUBLIC;
"""
CHANGED = (
    ("sent_day_needed(day, rows, archived)", "sent_day_needed(day, rows + {schema}.rows_elsewhere(day), archived)"),
    (
        "EXECUTE format(''DROP TABLE %s'', part);",
        """UPDATE {schema}.archived_day AS noted SET emptied = emptied + drop_sent_day.rows
                    WHERE noted.day = drop_sent_day.day;
                EXECUTE format(''DROP TABLE %s'', part);""",
    ),
)
CHANGE = """
DO $do$
DECLARE
    found CONSTANT text := pg_get_functiondef('{schema}.drop_sent_day(date, boolean, boolean)'::regprocedure);
    changed CONSTANT text := replace(found, '{old}', '{new}');
BEGIN
    IF changed = found THEN
        RAISE EXCEPTION 'function drop_sent_day is not that of migration 0011';
    END IF;
    EXECUTE changed;
END $do$;
"""

# Rows above the checkpoint of their lane, and those that its snapshot could not see, are still to be read. A lane
# without a checkpoint was not read. By one hash of the segment's names: 0.6 s for a million rows.
COVER = """
ALTER TABLE {schema}.segment
    ADD COLUMN covered_at timestamptz, -- when all lanes had passed it, and its rows were counted
    ADD COLUMN counted_at timestamptz, -- when that was tried last
    ADD COLUMN uncovered bigint; -- rows that were passed and that no receipt names

CREATE FUNCTION {schema}.cover_segment(number bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
    this {schema}.segment;
    passed boolean;
    missing bigint;
BEGIN
    SELECT * INTO this FROM {schema}.segment WHERE segment.number = cover_segment.number;
    IF this.cut_at IS NULL OR this.emptied_at IS NOT NULL THEN
        RETURN NULL;
    END IF;
    SELECT bool_and(low >= this.past - 1) INTO passed FROM {schema}.log_position;
    IF NOT passed AND this.cut_at > clock_timestamp() - interval '30 minutes' THEN
        RETURN NULL; -- the relay is about to
    END IF;
    EXECUTE format(
        'SELECT count(*)
        FROM {schema}.log_position AS base JOIN %s AS row ON row.lane = base.lane AND row.id <= base.low
            AND row.xid < base.seen_to AND row.xid <> ALL (base.unseen)
        WHERE NOT EXISTS (SELECT FROM (SELECT unnest(ids) AS id FROM %s) AS named WHERE named.id = row.id)',
        format('%I.%I', '{schema}', 'message_log_' || number), format('%I.%I', '{schema}', 'receipt_' || number))
        INTO missing;
    UPDATE {schema}.segment SET uncovered = missing, counted_at = clock_timestamp(),
            covered_at = CASE WHEN passed THEN clock_timestamp() END
        WHERE segment.number = cover_segment.number;
    RETURN missing;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.cover_segment(bigint) FROM PUBLIC;

-- The segments whose rows were all sent and are older than is kept; size with indexes and what is stored out of line.
CREATE FUNCTION {schema}.old_segments(keep integer) RETURNS TABLE (number bigint, day date, size bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $$
DECLARE
    this record;
    is_old boolean;
BEGIN
    FOR this IN
        SELECT segment.number, (cut_at AT TIME ZONE 'UTC')::date AS day,
            format('%I.%I', '{schema}', 'message_log_' || segment.number)::regclass AS log,
            format('%I.%I', '{schema}', 'receipt_' || segment.number)::regclass AS receipts
        FROM {schema}.segment
        WHERE emptied_at IS NULL AND past <= (SELECT last_value FROM {schema}.message_id_seq)
            AND (segment.number = 0 OR cut_at < (now() AT TIME ZONE 'UTC')::date - keep)
        ORDER BY past
    LOOP
        EXECUTE format(
            'SELECT NOT EXISTS (SELECT FROM %s WHERE sent_at >= $1) AND ($2 > 0 OR EXISTS (SELECT FROM %s))',
            this.receipts, this.log) INTO is_old USING (now() AT TIME ZONE 'UTC')::date - keep, this.number;
        IF is_old THEN
            old_segments.number := this.number;
            old_segments.day := this.day;
            old_segments.size := pg_total_relation_size(this.log) + pg_total_relation_size(this.receipts);
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.old_segments(integer) FROM PUBLIC;
"""

# A role that may ask `message_count` may ask since when messages wait.
# Relays look after segments, and retention empties them.
RIGHTS = """
SELECT {schema}.copy_rights('{schema}.message_count', '{schema}.message_waits');
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT 'cover_segment(bigint)' AS function, grantee::regrole AS role
        FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.message_pending'::regclass AND privilege_type = 'DELETE'
            AND grantee NOT IN (0, relowner)
        UNION ALL
        SELECT 'old_segments(integer)', grantee::regrole
        FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = '{schema}.drop_segment()'::regprocedure AND grantee NOT IN (0, proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.%s TO %s', held.function, held.role);
    END LOOP;
END $do$;
"""

# `block` stays: a view loses a column only if it is dropped, and its grants with it.
DOWN = """
CREATE OR REPLACE FUNCTION {schema}.sent(since timestamptz, until timestamptz) RETURNS SETOF {schema}.message_state
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT * FROM {schema}.message_state WHERE state = 'sent' AND sent_at >= since AND sent_at < until;
END;
DROP FUNCTION {schema}.sent_blocks(timestamptz, timestamptz);
CREATE OR REPLACE VIEW {schema}.message_state AS SELECT {columns}, NULL::bigint AS block FROM {schema}.message;
CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
DROP VIEW {schema}.message_waits, {schema}.log_pending, {schema}.log_late, {schema}.log_named, {schema}.log_position;
DROP FUNCTION {schema}.rows_elsewhere(date);
DROP FUNCTION {schema}.cover_segment(bigint);
DROP FUNCTION {schema}.old_segments(integer);
ALTER TABLE {schema}.segment DROP COLUMN covered_at, DROP COLUMN counted_at, DROP COLUMN uncovered;
"""


def columns(**values: str) -> str:
    """Return the columns of `message_state`, where `values` gives what is not a column of the row."""
    return ", ".join(f"{values[name]} AS {name}" if name in values else f"row.{name}" for name in COLUMNS)


def upgrade(schema: str) -> None:
    texts = {state: columns(state=f"'{state}'::text") for state in ("pending", "parked", "quarantined", "discarded")}
    texts |= {
        "sent": columns(state="'sent'::text"),
        "log_pending": columns(state="'pending'::text", sent_at="NULL::timestamptz", **IN_LOG),
        "log_sent": columns(state="'sent'::text", sent_at="receipt.sent_at", **IN_LOG),
        "lanes": LANES,
    }
    for script in (AS_OWNER, PENDING, COUNT, STATE, SENT, DROP_DAY, COVER, RIGHTS):
        op.execute(script.format(schema=schema, **texts))
    for old, new in CHANGED:
        op.execute(CHANGE.format(schema=schema, old=old, new=new.format(schema=schema)))
    op.execute("RESET ROLE")


def downgrade(schema: str) -> None:
    for old, new in CHANGED:
        op.execute(CHANGE.format(schema=schema, old=new.format(schema=schema), new=old))
    op.execute(DOWN.format(schema=schema, columns=", ".join(COLUMNS)))
