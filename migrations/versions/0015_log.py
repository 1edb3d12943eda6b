"""Add the log: rows stay where they were inserted, and receipts name those that are sent. No row goes there yet.

Rows of the state 'written' are the log, in segments by range of id. A row of the log is sent if and only if a receipt
names its id. The default of `state` stays 'pending', so relays and writers go on as before, and the log is empty until
a later release sets the default to 'written'.

`message_count`, `message_state` and `sent` answer over both: a row of the log is `pending` or `sent`.

Made as the owner of the tables, whichever role migrates. Roles that may delete pending rows are relays, and roles that
may drop days are retention's: they get their rights on the log at once.

Lock: ACCESS EXCLUSIVE on message and its partitions for an instant, to add a column; it waits for transactions that
have written or read. The way back holds it until the sent rows of the log are in their days: 10 s for a million rows.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("checkpoint", "receipt", "segment")  # after moving the rows of the log to their days

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# `xid` tells what a snapshot could not see. The default is on `message` alone: a row that a mark moves to its day
# needs none, and stays eight bytes smaller.
# A DEFAULT partition, so that no writer ever fails for want of a segment. The price: no DETACH CONCURRENTLY. A segment
# is emptied by TRUNCATE.
# BRIN, not a btree: 1 to 4 bytes of WAL a row instead of 76. And bigint: for xid8 BRIN has no operator class, a client
# no type, and `xid >= ... OR xid = ANY (...)` says in bigint what a snapshot could not see.
LOG = """
ALTER TABLE {schema}.message ADD COLUMN xid bigint;
ALTER TABLE ONLY {schema}.message ALTER COLUMN xid SET DEFAULT pg_current_xact_id()::text::bigint;

CREATE TABLE {schema}.message_log PARTITION OF {schema}.message FOR VALUES IN ('written') PARTITION BY RANGE (id);
CREATE UNIQUE INDEX message_log_lane_id ON {schema}.message_log (lane, id);
CREATE INDEX message_log_xid ON {schema}.message_log USING brin (xid int8_minmax_multi_ops)
    WITH (pages_per_range = 32);
CREATE TABLE {schema}.message_log_far PARTITION OF {schema}.message_log DEFAULT;

-- One row for each mark and block of 4,096 ids. Never changed and never deleted: emptied with its segment.
CREATE TABLE {schema}.receipt (
    block bigint NOT NULL, -- id >> 12 of each of its ids
    n integer NOT NULL,
    sent_at timestamptz NOT NULL DEFAULT now(),
    node text,
    ids bigint[] NOT NULL,
    CONSTRAINT receipt_ids CHECK (n > 0 AND n = cardinality(ids) AND block = ALL (ARRAY[ids[1] >> 12, ids[n] >> 12]))
) PARTITION BY RANGE (block);
CREATE INDEX receipt_block ON {schema}.receipt (block);
CREATE TABLE {schema}.receipt_far PARTITION OF {schema}.receipt DEFAULT;

CREATE TABLE {schema}.segment (
    number bigint PRIMARY KEY,
    first bigint NOT NULL UNIQUE, -- the lowest id that it takes; of the first segment, that lower ones go there, too
    past bigint NOT NULL UNIQUE, -- the lowest id that it does not take any more
    made_at timestamptz NOT NULL DEFAULT now(),
    cut_at timestamptz, -- when ids were first seen to be given behind it
    rows bigint, -- when it was emptied, as `sent`
    sent bigint,
    emptied_at timestamptz,
    CONSTRAINT segment_blocks CHECK (first < past AND first & 4095 = 0 AND past & 4095 = 0)
);

-- Where to begin reading, never what is sent. Appended, and old ones deleted.
CREATE TABLE {schema}.checkpoint (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    noted_at timestamptz NOT NULL DEFAULT now(),
    cluster bigint NOT NULL, -- pg_control_system(): the transaction ids of a restored one say nothing
    lanes smallint[] NOT NULL,
    lows bigint[] NOT NULL, -- lane by lane: each row at or below it that its snapshot could see has a receipt
    seen_to bigint NOT NULL, -- the snapshot: transactions below this one are seen
    unseen bigint[] NOT NULL, -- but these, which were running or are still caught up with
    position bigint NOT NULL, -- transactions that are neither take their ids above it
    CONSTRAINT checkpoint_lanes CHECK (cardinality(lanes) > 0 AND cardinality(lanes) = cardinality(lows))
);
"""

# `freeze_min_age = 0`: a page that is frozen before the next checkpoint costs a tenth of the WAL of one frozen later.
# A statement that is writing knows the partitions of its beginning: with one more, the rows that it sends to `far`
# would be refused. So a segment is attached while no transaction is open that has written to the log.
MAKE_SEGMENT = """
CREATE FUNCTION {schema}.copy_rights(source regclass, target regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS role, privilege_type AS privilege
        FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = source AND grantee <> relowner
    LOOP
        EXECUTE format('GRANT %s ON %s TO %s', held.privilege, target, held.role);
    END LOOP;
END $$;

CREATE FUNCTION {schema}.make_segment(number bigint, first bigint, past bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    log CONSTANT text := format('%I.%I', '{schema}', 'message_log_' || number);
    receipts CONSTANT text := format('%I.%I', '{schema}', 'receipt_' || number);
BEGIN
    EXECUTE format(
        'CREATE TABLE %s (LIKE {schema}.message_log INCLUDING ALL) WITH (
            autovacuum_freeze_min_age = 0, autovacuum_vacuum_insert_threshold = 100000,
            autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_cost_delay = 0,
            autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000)', log);
    EXECUTE format('CREATE TABLE %s (LIKE {schema}.receipt INCLUDING ALL)', receipts);
    PERFORM {schema}.copy_rights('{schema}.message_log', log::regclass);
    LOCK TABLE ONLY {schema}.message_log, ONLY {schema}.receipt IN SHARE ROW EXCLUSIVE MODE;
    IF number > 1 AND (SELECT last_value FROM {schema}.message_id_seq) >= first THEN
        RAISE EXCEPTION 'ids beyond % are given already', first USING ERRCODE = 'lock_not_available';
    END IF;
    EXECUTE format(
        'ALTER TABLE {schema}.message_log ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)',
        log, CASE number WHEN 1 THEN 'MINVALUE' ELSE first::text END, past);
    EXECUTE format(
        'ALTER TABLE {schema}.receipt ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)',
        receipts, CASE number WHEN 1 THEN 'MINVALUE' ELSE (first >> 12)::text END, past >> 12);
    INSERT INTO {schema}.segment (number, first, past) VALUES (number, first, past);
END $$;

REVOKE EXECUTE ON FUNCTION {schema}.copy_rights(regclass, regclass), {schema}.make_segment(bigint, bigint, bigint)
    FROM PUBLIC;
"""

# One step a call, each of which holds writers back for some 50 ms at most: call it until it returns NULL, and again
# later where it finds no lock.
# ATTACH reads all of `message_log_far` under ACCESS EXCLUSIVE, unless a constraint says what is in it. Empty, it costs
# nothing. Once ids are given beyond the last segment, `far` becomes a segment itself, in three steps: bound it, far
# above all ids to come; read it, beside its writers; change it for an empty one.
ENSURE_SEGMENTS = """
CREATE FUNCTION {schema}.ensure_segments(ahead integer, size bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '15ms' AS $$
DECLARE
    position bigint;
    last record;
    bounded record;
    bound bigint;
BEGIN
    IF (ahead BETWEEN 1 AND 64 AND size BETWEEN 4096 AND 1 << 24 AND size & 4095 = 0) IS NOT TRUE THEN
        RAISE EXCEPTION '1 to 64 segments are made ahead, of 4096 to % ids, a multiple of 4096: not % of %',
            1 << 24, ahead, size USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOCK TABLE {schema}.segment IN SHARE ROW EXCLUSIVE MODE;
    SELECT last_value INTO position FROM {schema}.message_id_seq;
    UPDATE {schema}.segment SET cut_at = clock_timestamp() WHERE past <= position AND cut_at IS NULL;
    IF (SELECT count(*) FROM {schema}.segment WHERE past > position) > ahead THEN
        RETURN NULL;
    END IF;
    SELECT number, past INTO last FROM {schema}.segment ORDER BY past DESC LIMIT 1;
    IF last IS NULL THEN
        SELECT 0::bigint AS number, position >> 12 << 12 AS past INTO last;
    END IF;
    IF position < last.past OR (last.number = 0 AND NOT EXISTS (SELECT FROM {schema}.message_log_far)) THEN
        PERFORM {schema}.make_segment(last.number + 1, last.past, last.past + size);
        RETURN 'made';
    END IF;

    SELECT convalidated AS is_read, substring(obj_description(oid, 'pg_constraint') FROM '[0-9]+')::bigint AS past
        INTO bounded FROM pg_constraint
        WHERE conrelid = '{schema}.message_log_far'::regclass AND conname = 'message_log_far_bound';
    IF bounded IS NULL THEN
        bound := ((position >> 32) + 2) << 32;
        EXECUTE format(
            'ALTER TABLE {schema}.message_log_far ADD CONSTRAINT message_log_far_bound
                CHECK (state IS NOT NULL AND state = %L AND id >= %s AND id < %s) NOT VALID',
            'written', CASE last.number WHEN 0 THEN 0 ELSE last.past END, bound);
        EXECUTE format(
            'COMMENT ON CONSTRAINT message_log_far_bound ON {schema}.message_log_far IS %L', 'ends before ' || bound);
        EXECUTE format(
            'ALTER TABLE {schema}.receipt_far ADD CONSTRAINT receipt_far_bound CHECK (block >= %s AND block < %s)
                NOT VALID', CASE last.number WHEN 0 THEN 0 ELSE last.past >> 12 END, bound >> 12);
        RETURN 'bounded';
    ELSIF NOT bounded.is_read THEN
        ALTER TABLE {schema}.message_log_far VALIDATE CONSTRAINT message_log_far_bound;
        ALTER TABLE {schema}.receipt_far VALIDATE CONSTRAINT receipt_far_bound;
        RETURN 'read';
    END IF;
    PERFORM {schema}.change_far(last.number + 1, CASE last.number WHEN 0 THEN 0 ELSE last.past END, bounded.past);
    RETURN 'changed';
END $$;

-- The constraint that was read says that no row is out of the bounds, so ATTACH reads none.
CREATE FUNCTION {schema}.change_far(number bigint, first bigint, past bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    parent text;
    unit bigint;
BEGIN
    CREATE TABLE {schema}.message_log_next (LIKE {schema}.message_log INCLUDING ALL);
    CREATE TABLE {schema}.receipt_next (LIKE {schema}.receipt INCLUDING ALL);
    PERFORM {schema}.copy_rights('{schema}.message_log', '{schema}.message_log_next');
    LOCK TABLE ONLY {schema}.message_log, ONLY {schema}.receipt IN ACCESS EXCLUSIVE MODE;
    FOR parent, unit IN VALUES ('message_log', 1::bigint), ('receipt', 4096) LOOP
        EXECUTE format('ALTER TABLE {schema}.%I DETACH PARTITION {schema}.%I', parent, parent || '_far');
        EXECUTE format('ALTER TABLE {schema}.%I RENAME TO %I', parent || '_far', parent || '_' || number);
        EXECUTE format(
            'ALTER TABLE {schema}.%I ATTACH PARTITION {schema}.%I FOR VALUES FROM (%s) TO (%s)',
            parent, parent || '_' || number, first / unit, past / unit);
        EXECUTE format('ALTER TABLE {schema}.%I DROP CONSTRAINT %I', parent || '_' || number, parent || '_far_bound');
        EXECUTE format('ALTER TABLE {schema}.%I RENAME TO %I', parent || '_next', parent || '_far');
        EXECUTE format('ALTER TABLE {schema}.%I ATTACH PARTITION {schema}.%I DEFAULT', parent, parent || '_far');
    END LOOP;
    INSERT INTO {schema}.segment (number, first, past) VALUES (number, first, past);
END $$;

REVOKE EXECUTE ON FUNCTION {schema}.ensure_segments(integer, bigint), {schema}.change_far(bigint, bigint, bigint)
    FROM PUBLIC;
"""

# By nextval, id by id, as long as the rest is small: setval could go back behind ids that others have taken between
# its reading and its writing, and two rows of one id would share a receipt. Over 2^24 ids nobody is so fast.
CUT_SEGMENT = """
CREATE FUNCTION {schema}.cut_segment() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '15ms' AS $$
DECLARE
    position bigint;
    this record;
BEGIN
    LOCK TABLE {schema}.segment IN SHARE ROW EXCLUSIVE MODE;
    SELECT last_value INTO position FROM {schema}.message_id_seq;
    SELECT number, past INTO this FROM {schema}.segment
        WHERE position >= first AND position < past
            AND EXISTS (SELECT FROM {schema}.segment AS next WHERE next.first = segment.past);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF this.past - position > 1 << 24 THEN
        PERFORM setval('{schema}.message_id_seq', this.past);
    ELSE
        WHILE position < this.past LOOP
            PERFORM nextval('{schema}.message_id_seq') FROM generate_series(1, this.past - position);
            SELECT last_value INTO position FROM {schema}.message_id_seq;
        END LOOP;
    END IF;
    UPDATE {schema}.segment SET cut_at = clock_timestamp() WHERE past <= this.past AND cut_at IS NULL;
    RETURN this.number;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.cut_segment() FROM PUBLIC;
"""

# Cover by id is checked twice: of all rows beside everybody, and under the lock that keeps writers of this segment out,
# of the rows that the first look could not see. The first look's rows must all be there still, and no others.
# Under SHARE others may still read. A snapshot from before the lock would not see all rows: READ COMMITTED only.
EMPTY_SEGMENT = """
CREATE FUNCTION {schema}.empty_segment(number bigint, dry_run boolean, OUT rows bigint, OUT kept_by text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '15ms' SET TimeZone = 'UTC'
AS $$
DECLARE
    log CONSTANT regclass := format('%I.%I', '{schema}', 'message_log_' || number)::regclass;
    receipts CONSTANT regclass := format('%I.%I', '{schema}', 'receipt_' || number)::regclass;
    this {schema}.segment;
    covered pg_snapshot;
    uncovered bigint;
    seen bigint;
    still_seen bigint;
    in_receipts bigint;
    first_sent timestamptz;
    last_sent timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR dry_run IS NULL THEN
        RAISE EXCEPTION 'a segment is emptied in a transaction of the isolation level READ COMMITTED'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO this FROM {schema}.segment WHERE segment.number = empty_segment.number FOR UPDATE;
    IF this IS NULL OR this.emptied_at IS NOT NULL
            OR this.past > (SELECT last_value FROM {schema}.message_id_seq) THEN
        RAISE EXCEPTION '% is no segment behind which ids are given, or is empty', number
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format(
        'SELECT pg_current_snapshot(), count(*),
            count(*) FILTER (WHERE pg_visible_in_snapshot(xid::text::xid8, pg_current_snapshot())),
            count(*) FILTER (WHERE named.id IS NULL)
        FROM %s AS row LEFT JOIN (SELECT DISTINCT unnest(ids) AS id FROM %s) AS named USING (id)', log, receipts)
        INTO covered, rows, seen, uncovered;
    EXECUTE format('SELECT min(sent_at), max(sent_at), coalesce(sum(n), 0) FROM %s', receipts)
        INTO first_sent, last_sent, in_receipts;
    kept_by := CASE
        WHEN uncovered > 0 THEN uncovered || ' of its rows have no receipt: the relay has not sent them'
        WHEN last_sent >= (now() AT TIME ZONE 'UTC')::date THEN 'some of its rows were sent today'
        ELSE (SELECT min({schema}.sent_day_needed(day::date, 0, false))
            FROM generate_series(first_sent::date, last_sent::date, interval '1 day') AS day)
    END;
    IF dry_run OR kept_by IS NOT NULL THEN
        RETURN;
    END IF;
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', log);
    EXECUTE format(
        'SELECT count(*), count(*) FILTER (WHERE is_seen), count(*) FILTER (WHERE is_seen IS NOT TRUE AND NOT EXISTS (
            SELECT FROM %s AS receipt WHERE block = row.id >> 12 AND row.id = ANY (ids)))
        FROM (SELECT id, pg_visible_in_snapshot(xid::text::xid8, $1) AS is_seen FROM %s) AS row', receipts, log)
        USING covered INTO rows, still_seen, uncovered;
    IF uncovered > 0 OR still_seen <> seen THEN
        kept_by := 'its rows have changed since they were counted';
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('{schema}.replay and retention', 0));
    kept_by := (SELECT min({schema}.sent_day_needed(day::date, 0, false))
        FROM generate_series(first_sent::date, last_sent::date, interval '1 day') AS day);
    IF kept_by IS NULL THEN
        EXECUTE format('LOCK TABLE ONLY %s, ONLY %s IN ACCESS EXCLUSIVE MODE', log, receipts);
        EXECUTE format('TRUNCATE ONLY %s, ONLY %s', log, receipts);
        UPDATE {schema}.segment SET emptied_at = now(), rows = empty_segment.rows, sent = in_receipts
            WHERE segment.number = empty_segment.number;
    END IF;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.empty_segment(bigint, boolean) FROM PUBLIC;
"""

# The rows of the log without a receipt. Each lane begins at its last checkpoint. Above it every row is compared, by one
# hash of the ids in receipts: to look into the receipts for each row costs up to 0.3 ms. At or below it are only those
# rows that its snapshot could not see, looked up by block. Without a checkpoint of this cluster every row is compared.
PENDING_LOG = """
CREATE VIEW {schema}.message_log_pending AS
    WITH base AS (
        SELECT lane::smallint, coalesce(low, -9223372036854775808) AS low, seen_to, unseen
        FROM generate_series(0, 15) AS lane
        LEFT JOIN LATERAL (
            SELECT lows[array_position(lanes, lane::smallint)] AS low, seen_to, unseen
            FROM {schema}.checkpoint
            WHERE lane::smallint = ANY (lanes) AND cluster = (SELECT system_identifier FROM pg_control_system())
            ORDER BY number DESC
            LIMIT 1
        ) AS last ON true
    ), named AS MATERIALIZED (
        SELECT unnest(ids) AS id FROM {schema}.receipt WHERE block >= (SELECT min(low) >> 12 FROM base)
    )
    SELECT row.* FROM base JOIN {schema}.message_log AS row ON row.lane = base.lane AND row.id > base.low
    WHERE NOT EXISTS (SELECT FROM named WHERE named.id = row.id)
    UNION ALL
    SELECT row.* FROM base JOIN {schema}.message_log AS row ON row.lane = base.lane AND row.id <= base.low
    WHERE row.xid >= (SELECT min(least(seen_to, (SELECT min(xid) FROM unnest(unseen) AS xid))) FROM base)
        AND (row.xid >= base.seen_to OR row.xid = ANY (base.unseen))
        AND NOT EXISTS (SELECT FROM {schema}.receipt WHERE block = row.id >> 12 AND row.id = ANY (ids));
"""

# Both parts of a state are counted below one aggregate, so that the planner leaves out a state that nobody asks for.
COUNT = """
CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, sum(part.rows)::bigint AS messages FROM (
        SELECT count(*) AS rows FROM {schema}.message_pending
        UNION ALL SELECT count(*) FROM {schema}.message_log_pending
    ) AS part
    UNION ALL SELECT 'sent', sum(part.rows)::bigint FROM (
        SELECT count(*) AS rows FROM {schema}.message WHERE state = 'sent'
        UNION ALL SELECT coalesce(sum(n), 0) FROM {schema}.receipt
    ) AS part
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
"""

# A constant as the state of each part of the log: whoever asks for parked messages does not read it. From receipts to
# rows, so that the times of `sent` choose the receipts. All lanes are named for the index to be used by id alone.
STATE = """
CREATE OR REPLACE VIEW {schema}.message_state AS
    SELECT {columns} FROM {schema}.message WHERE state <> 'written'
    UNION ALL
    SELECT {pending} FROM {schema}.message_log_pending
    UNION ALL
    SELECT {sent}
    FROM {schema}.receipt CROSS JOIN LATERAL unnest(ids) AS named (id)
    JOIN {schema}.message_log AS row ON row.id = named.id AND row.id >> 12 = block
        AND lane = ANY ('{{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}');
"""

COLUMNS = (
    *("id", "message_id", "aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "headers"),
    *("content_type", "payload", "payload_bytes", "created_at", "lane", "state", "attempts", "available_at"),
    *("last_error", "held_behind", "parked_at", "sent_at", "writer", "batch_id", "trace_context", "quarantine"),
)

GRANTS = """
DO $do$
DECLARE
    role text;
BEGIN
    FOR role IN
        SELECT grantee::regrole FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.message_pending'::regclass AND privilege_type = 'DELETE'
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON {schema}.message_log, {schema}.message_log_far, {schema}.receipt,
            {schema}.segment TO %s', role);
        EXECUTE format('GRANT INSERT (block, n, node, ids) ON {schema}.receipt TO %s', role);
        EXECUTE format('GRANT SELECT, INSERT, DELETE ON {schema}.checkpoint TO %s', role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.ensure_segments(integer, bigint), {schema}.cut_segment()
            TO %s', role);
    END LOOP;
    FOR role IN
        SELECT grantee::regrole FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = '{schema}.drop_sent_day(date, boolean, boolean)'::regprocedure
            AND grantee NOT IN (0, proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.empty_segment(bigint, boolean) TO %s', role);
    END LOOP;
END $do$;
"""

# Nothing of the log is lost: sent rows go to their days, and with a row that is not sent there is no way back.
DOWN = """
ALTER TABLE ONLY {schema}.message ALTER COLUMN state SET DEFAULT 'pending';
LOCK TABLE {schema}.message, {schema}.receipt IN ACCESS EXCLUSIVE MODE;
DO $do$
DECLARE
    unsent CONSTANT bigint := (SELECT count(*) FROM {schema}.message_log_pending);
BEGIN
    IF unsent > 0 THEN
        RAISE EXCEPTION '% messages of the log are not sent', unsent
            USING HINT = 'set the default of message.state to pending, and let the relay send them first',
                ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    PERFORM {schema}.make_day('message_sent', day)
    FROM (SELECT DISTINCT (sent_at AT TIME ZONE 'UTC')::date AS day FROM {schema}.receipt) AS sent
    WHERE {schema}.attached_day('message_sent', day) IS NULL;
END $do$;
INSERT INTO {schema}.message_sent ({stored}) SELECT {moved}
FROM {schema}.message_log AS row
JOIN (SELECT unnest(ids) AS id, min(sent_at) AS sent_at FROM {schema}.receipt GROUP BY 1) AS named USING (id);

CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
CREATE OR REPLACE VIEW {schema}.message_state AS SELECT {columns} FROM {schema}.message;

DROP VIEW {schema}.message_log_pending;
DROP FUNCTION {schema}.empty_segment(bigint, boolean);
DROP FUNCTION {schema}.cut_segment();
DROP FUNCTION {schema}.ensure_segments(integer, bigint);
DROP FUNCTION {schema}.change_far(bigint, bigint, bigint);
DROP FUNCTION {schema}.make_segment(bigint, bigint, bigint);
DROP FUNCTION {schema}.copy_rights(regclass, regclass);
DROP TABLE {schema}.checkpoint;
DROP TABLE {schema}.segment;
DROP TABLE {schema}.receipt;
DROP TABLE {schema}.message_log;
ALTER TABLE {schema}.message DROP COLUMN xid;
"""


def selected(**values: str) -> str:
    """List the columns of `message` without `xid`, some of them by other values."""
    return ", ".join(f"{values[name]} AS {name}" if name in values else name for name in COLUMNS)


def upgrade(schema: str) -> None:
    state = STATE.format(
        schema=schema,
        columns=selected(),
        pending=selected(state="'pending'::text"),
        sent=selected(id="row.id", state="'sent'::text", sent_at="receipt.sent_at"),
    )
    for script in (AS_OWNER, LOG, MAKE_SEGMENT, ENSURE_SEGMENTS, CUT_SEGMENT, EMPTY_SEGMENT, PENDING_LOG, COUNT):
        op.execute(script.format(schema=schema))
    op.execute(state)
    for script in (GRANTS, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    stored = ", ".join(name for name in COLUMNS if name != "lane")
    moved = stored.replace("state", "'sent'", 1).replace("sent_at", "named.sent_at")
    op.execute(DOWN.format(schema=schema, columns=selected(), stored=stored, moved=moved))
