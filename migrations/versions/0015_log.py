"""Add the log: rows stay where they were inserted, and receipts name those that are sent. No row goes there yet.

Rows of the state 'written' are the log, in segments by range of id. A row of the log is sent if and only if a receipt
names its id. The default of `state` stays 'pending', so relays and writers go on as before. The log is empty until
`relay migrate --log on` sets the default to 'written'.

The surfaces `message_count`, `message_state` and `sent` do not read the log yet: no plan and no answer changes.

Made as the owner of the tables, whichever role migrates. Roles that may delete pending rows are relays, and roles that
may drop days are retention's: they get their rights on the log at once.

Lock: ACCESS EXCLUSIVE on message and its partitions, and on archived_day, for an instant, to add a column. It waits
for transactions that have written or read. The way back holds it until the sent rows of the log are in their days:
10 s for a million rows.
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
# has no use for it, and stays eight bytes smaller.
# A DEFAULT partition, so that no writer ever fails for want of a segment. The price: no DETACH CONCURRENTLY. A segment
# is emptied by TRUNCATE.
# BRIN, not a btree: 1 to 4 bytes of WAL a row instead of 76. And bigint: for xid8 BRIN has no operator class, a client
# no type, and `xid >= ... OR xid = ANY (...)` says in bigint what a snapshot could not see.
# With the id: most rows that a snapshot could not see are still to be read, and lie behind those that came late.
LOG = """
ALTER TABLE {schema}.message ADD COLUMN xid bigint;
ALTER TABLE ONLY {schema}.message ALTER COLUMN xid SET DEFAULT pg_current_xact_id()::text::bigint;

CREATE TABLE {schema}.message_log PARTITION OF {schema}.message FOR VALUES IN ('written') PARTITION BY RANGE (id);
ALTER TABLE {schema}.message_log ALTER COLUMN xid SET NOT NULL; -- without it no read would find a late row
CREATE UNIQUE INDEX message_log_lane_id ON {schema}.message_log (lane, id);
CREATE INDEX message_log_xid ON {schema}.message_log USING brin (xid int8_minmax_multi_ops, id)
    WITH (pages_per_range = 32);
CREATE TABLE {schema}.message_log_far PARTITION OF {schema}.message_log DEFAULT;
CREATE TABLE {schema}.message_log_0 PARTITION OF {schema}.message_log FOR VALUES FROM (MINVALUE) TO (0);

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
CREATE INDEX receipt_sent ON {schema}.receipt USING brin (sent_at); -- a day's receipts, among those of weeks
CREATE TABLE {schema}.receipt_far PARTITION OF {schema}.receipt DEFAULT;
CREATE TABLE {schema}.receipt_0 PARTITION OF {schema}.receipt FOR VALUES FROM (MINVALUE) TO (0);

-- One row for each segment but `far`, which has all ids behind them. Each begins where the one before it ends.
CREATE TABLE {schema}.segment (
    number bigint PRIMARY KEY,
    first bigint NOT NULL UNIQUE, -- the lowest id that it takes
    past bigint NOT NULL UNIQUE, -- the lowest id that it does not take any more
    made_at timestamptz NOT NULL DEFAULT now(),
    cut_at timestamptz, -- when ids were first seen to be given behind it
    rows bigint, -- when it was emptied, as `sent`
    sent bigint,
    emptied_at timestamptz, -- NULL again, if a late row has come
    CONSTRAINT segment_blocks CHECK (first < past AND first & 4095 = 0 AND past & 4095 = 0)
);
-- Segment 0 takes ids by which no segment is left: of those that were dropped, and negative ones.
INSERT INTO {schema}.segment (number, first, past, cut_at) VALUES (0, -9223372036854775808, 0, now());
ALTER TABLE {schema}.archived_day ADD COLUMN emptied bigint NOT NULL DEFAULT 0; -- of its rows, with their segments

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
    IF EXISTS (SELECT FROM {schema}.message_log_far) OR EXISTS (SELECT FROM {schema}.receipt_far) THEN -- meanwhile
        RAISE EXCEPTION 'ids beyond % are given already', first USING ERRCODE = 'lock_not_available';
    END IF;
    EXECUTE format(
        'ALTER TABLE {schema}.message_log ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', log, first, past);
    EXECUTE format(
        'ALTER TABLE {schema}.receipt ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)',
        receipts, first >> 12, past >> 12);
    INSERT INTO {schema}.segment (number, first, past) VALUES (number, first, past);
END $$;

REVOKE EXECUTE ON FUNCTION {schema}.copy_rights(regclass, regclass), {schema}.make_segment(bigint, bigint, bigint)
    FROM PUBLIC;
"""

# All of `message` but the generated `lane`, and `xid`, which a row in its day does without.
MOVED = (
    *("id", "message_id", "aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "headers"),
    *("content_type", "payload", "payload_bytes", "created_at", "state", "attempts", "available_at"),
    *("last_error", "held_behind", "parked_at", "sent_at", "writer", "batch_id", "trace_context", "quarantine"),
)

# An id above the sequence's was named by its writer. In `far` it would be out of all bounds. So its row leaves the log:
# it moves to its day if it is sent, else to the pending rows. A receipt that comes after that names no row.
LEAVE_LOG = """
CREATE FUNCTION {schema}.leave_log(above bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.make_day('message_sent', day)
    FROM (SELECT DISTINCT (sent_at AT TIME ZONE 'UTC')::date AS day FROM {schema}.receipt WHERE block >= above >> 12)
        AS sent
    WHERE {schema}.attached_day('message_sent', day) IS NULL;
    WITH named AS (
        SELECT unnest(ids) AS id, min(sent_at) AS sent_at FROM {schema}.receipt WHERE block >= above >> 12 GROUP BY 1
    ), gone AS (
        DELETE FROM {schema}.message_log AS row USING named
        WHERE row.id = named.id AND row.id > above AND lane = ANY ({lanes})
        RETURNING {moved}
    )
    INSERT INTO {schema}.message_sent ({stored}) SELECT * FROM gone;
    UPDATE {schema}.message SET state = 'pending' WHERE state = 'written' AND id > above AND lane = ANY ({lanes});
    DELETE FROM {schema}.receipt WHERE block > above >> 12;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.leave_log(bigint) FROM PUBLIC;
"""
LANES = "'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'"  # all: an index by lane and id is then used by id alone

# An id must not come again: a receipt of the row that had it before would settle the new row. So the sequence leaps
# over all ids that were given, if it was set back. It leaps so far that nobody takes as many ids meanwhile: else setval
# could set it back again. Sweeps find the rows that have come until then: they compare their times with those of
# receipts. In `far` are receipts of ids that writers have named, so that they do not count.
LEAP_OVER_SETTLED = """
CREATE FUNCTION {schema}.settled_to() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT greatest(
        0,
        (SELECT max(id) FROM {schema}.receipt, unnest(ids) AS id WHERE block = (
            SELECT max(block) FROM {schema}.receipt WHERE block < (SELECT max(past) >> 12 FROM {schema}.segment))),
        (SELECT max(past) - 1 FROM {schema}.segment WHERE cut_at IS NOT NULL AND number > 0),
        (SELECT max(low) FROM {schema}.checkpoint, unnest(lows) AS low
            WHERE cluster = (SELECT system_identifier FROM pg_control_system()))
    )
$$;

CREATE FUNCTION {schema}.leap_over_settled() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    settled CONSTANT bigint := {schema}.settled_to();
    leap CONSTANT bigint := (((settled >> 12) + 1) << 12) + (1 << 24);
BEGIN
    IF (SELECT last_value - (NOT is_called)::integer >= settled FROM {schema}.message_id_seq) THEN
        RETURN false;
    END IF;
    PERFORM setval('{schema}.message_id_seq', leap);
    UPDATE {schema}.checkpoint SET position = leap WHERE lanes[1] < 0; -- those of sweeps
    RETURN true;
END $$;

CREATE FUNCTION {schema}.keep_ids() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.leap_over_settled();
    RETURN NULL;
END $$;
CREATE TRIGGER keep_ids AFTER TRUNCATE ON {schema}.message
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.keep_ids();
REVOKE EXECUTE ON FUNCTION {schema}.settled_to(), {schema}.leap_over_settled(),
    {schema}.keep_ids() FROM PUBLIC;
"""

# Each call makes one step, which holds writers back for some 50 ms at most. Call it until it returns NULL, and again
# later if it finds no lock.
# ATTACH reads all of `message_log_far` under ACCESS EXCLUSIVE, unless a constraint says what is in it. Empty, it costs
# nothing. Once ids are given beyond the last segment, `far` becomes a segment itself, in three steps. The first bounds
# it, far above all ids to come. The second reads it while writers go on. The third changes it for an empty one.
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
    IF EXISTS (SELECT FROM {schema}.message_log_far WHERE id > position AND lane = ANY ({lanes}))
            OR EXISTS (SELECT FROM {schema}.receipt_far WHERE block > position >> 12) THEN
        PERFORM {schema}.leave_log(position);
    END IF;
    SELECT number, past INTO last FROM {schema}.segment ORDER BY past DESC LIMIT 1;
    SELECT convalidated AS is_read, substring(obj_description(oid, 'pg_constraint') FROM '[0-9]+')::bigint AS past
        INTO bounded FROM pg_constraint
        WHERE conrelid = '{schema}.message_log_far'::regclass AND conname = 'message_log_far_bound';
    IF bounded IS NULL AND NOT EXISTS (SELECT FROM {schema}.message_log_far)
            AND NOT EXISTS (SELECT FROM {schema}.receipt_far) THEN
        PERFORM {schema}.make_segment(last.number + 1, last.past, greatest(last.past, position >> 12 << 12) + size);
        RETURN 'made';
    ELSIF bounded IS NULL THEN
        bound := ((position >> 32) + 2) << 32;
        EXECUTE format(
            'ALTER TABLE {schema}.message_log_far ADD CONSTRAINT message_log_far_bound
                CHECK (state IS NOT NULL AND state = %L AND id >= %s AND id < %s) NOT VALID',
            'written', last.past, bound);
        EXECUTE format(
            'COMMENT ON CONSTRAINT message_log_far_bound ON {schema}.message_log_far IS %L', 'ends before ' || bound);
        EXECUTE format(
            'ALTER TABLE {schema}.receipt_far ADD CONSTRAINT receipt_far_bound CHECK (block >= %s AND block < %s)
                NOT VALID', last.past >> 12, bound >> 12);
        RETURN 'bounded';
    ELSIF NOT bounded.is_read THEN
        ALTER TABLE {schema}.message_log_far VALIDATE CONSTRAINT message_log_far_bound;
        ALTER TABLE {schema}.receipt_far VALIDATE CONSTRAINT receipt_far_bound;
        RETURN 'read';
    END IF;
    PERFORM {schema}.change_far(last.number + 1, last.past, bounded.past);
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

# By nextval, id by id, as long as the rest is small. Others may take ids between the reading and the writing of setval.
# It could go back behind those, and two rows of one id would share a receipt. Over 2^24 ids nobody is so fast.
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

# Cover by id is checked twice. The first look is at all rows, without a lock. The second is under the lock that keeps
# writers of this segment out, at the rows that the first could not see. All rows of the first must still be there.
# Under SHARE others may still read. A snapshot from before the lock would not see all rows: READ COMMITTED only.
EMPTY_SEGMENT = """
-- By day: an archive is complete if the rows of the day that are there, and those that left with their segments, are
-- as many as were archived.
CREATE FUNCTION {schema}.segment_needed(first_sent timestamptz, last_sent timestamptz, archived boolean) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $$
    SELECT min(day || ': ' || {schema}.sent_day_needed(day, CASE WHEN archived THEN (
        SELECT coalesce(sum(n), 0)::bigint FROM {schema}.receipt WHERE sent_at >= day AND sent_at < day + 1
    ) + (
        SELECT count(*) FROM {schema}.message_sent WHERE sent_at >= day AND sent_at < day + 1
    ) + coalesce(noted.emptied, 0) END, archived))
    FROM (SELECT day::date FROM generate_series(first_sent::date, last_sent::date, interval '1 day') AS day) AS sent
    LEFT JOIN {schema}.archived_day AS noted USING (day)
$$;
REVOKE EXECUTE ON FUNCTION {schema}.segment_needed(timestamptz, timestamptz, boolean) FROM PUBLIC;

CREATE FUNCTION {schema}.empty_segment(
    number bigint, archived boolean, dry_run boolean, OUT rows bigint, OUT kept_by text
)
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
    IF current_setting('transaction_isolation') <> 'read committed' OR num_nulls(archived, dry_run) > 0 THEN
        RAISE EXCEPTION 'a segment is emptied in a transaction of the isolation level READ COMMITTED, without NULL'
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
        ELSE {schema}.segment_needed(first_sent, last_sent, archived)
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
    -- Making a replay takes it shared (relay/replay/job.py), and a job of Spark its days.
    PERFORM pg_advisory_xact_lock(hashtextextended('{schema}.replay and retention', 0));
    kept_by := coalesce({schema}.segment_needed(first_sent, last_sent, archived), (
        SELECT min('a job of Spark read ' || day::date || ' a moment ago')
        FROM generate_series(first_sent::date, last_sent::date, interval '1 day') AS day
        WHERE NOT pg_try_advisory_xact_lock(hashtextextended('{schema}.day ' || to_char(day, 'YYYY-MM-DD'), 0))));
    IF kept_by IS NULL THEN
        EXECUTE format('LOCK TABLE ONLY %s, ONLY %s IN ACCESS EXCLUSIVE MODE', log, receipts);
        EXECUTE format(
            'UPDATE {schema}.archived_day AS noted SET emptied = emptied + left_with.rows
            FROM (SELECT sent_at::date AS day, sum(n) AS rows FROM %s GROUP BY 1) AS left_with
            WHERE noted.day = left_with.day', receipts);
        EXECUTE format('TRUNCATE ONLY %s, ONLY %s', log, receipts);
        -- Segment 0 is never done: late rows come again.
        UPDATE {schema}.segment SET emptied_at = CASE WHEN this.number > 0 THEN now() END,
                rows = empty_segment.rows, sent = in_receipts
            WHERE segment.number = empty_segment.number;
    END IF;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.empty_segment(bigint, boolean, boolean) FROM PUBLIC;
"""

# The lowest one first. So all dropped ids lie below those of the other segments, and segment 0 takes them. A writer may
# hold such an id as long as it likes. A late row in `far` would keep `far` from becoming a segment.
# First it locks the segment alone, and those that are hardly ever written. Then it locks the parents, at a moment when
# no transaction is open that has written to the log. Writers queue for 15 ms at most, then while catalogs change. To
# attach segment 0 again reads its rows, so it may have few. It also reads those of `far`, so `far` must be empty.
DROP_SEGMENT = """
CREATE FUNCTION {schema}.drop_segment() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '15ms' AS $$
DECLARE
    this {schema}.segment;
    has_rows boolean;
    parent text;
    unit bigint;
BEGIN
    LOCK TABLE {schema}.segment IN SHARE ROW EXCLUSIVE MODE;
    SELECT * INTO this FROM {schema}.segment WHERE segment.number > 0 ORDER BY segment.past LIMIT 1;
    IF this.emptied_at IS NULL OR EXISTS (SELECT FROM {schema}.message_log_far)
            OR EXISTS (SELECT FROM {schema}.message_log_0 OFFSET 10000)
            OR EXISTS (SELECT FROM {schema}.receipt_0 OFFSET 10000) THEN
        RETURN NULL;
    END IF;
    EXECUTE format(
        'LOCK TABLE {schema}.%I, {schema}.%I, {schema}.message_log_0, {schema}.receipt_0, {schema}.message_log_far,
            {schema}.receipt_far IN ACCESS EXCLUSIVE MODE', 'message_log_' || this.number, 'receipt_' || this.number);
    EXECUTE format('SELECT EXISTS (SELECT FROM {schema}.%I)', 'message_log_' || this.number) INTO has_rows;
    IF has_rows THEN
        UPDATE {schema}.segment SET emptied_at = NULL WHERE segment.number = this.number;
        RETURN NULL;
    END IF;
    LOCK TABLE ONLY {schema}.message_log, ONLY {schema}.receipt IN ACCESS EXCLUSIVE MODE;
    FOR parent, unit IN VALUES ('message_log', 1::bigint), ('receipt', 4096) LOOP
        EXECUTE format('DROP TABLE {schema}.%I', parent || '_' || this.number);
        EXECUTE format('ALTER TABLE {schema}.%I DETACH PARTITION {schema}.%I', parent, parent || '_0');
        EXECUTE format(
            'ALTER TABLE {schema}.%I ATTACH PARTITION {schema}.%I FOR VALUES FROM (MINVALUE) TO (%s)',
            parent, parent || '_0', this.past / unit);
    END LOOP;
    DELETE FROM {schema}.segment WHERE segment.number = this.number;
    UPDATE {schema}.segment SET past = this.past WHERE segment.number = 0;
    RETURN this.number;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.drop_segment() FROM PUBLIC;
"""

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
        EXECUTE format('GRANT SELECT ON {schema}.message_log, {schema}.message_log_0, {schema}.message_log_far,
            {schema}.receipt, {schema}.segment TO %s', role);
        EXECUTE format('GRANT INSERT (block, n, node, ids) ON {schema}.receipt TO %s', role);
        EXECUTE format('GRANT SELECT, INSERT, DELETE ON {schema}.checkpoint TO %s', role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.ensure_segments(integer, bigint), {schema}.cut_segment(),
            {schema}.settled_to(), {schema}.leap_over_settled() TO %s', role);
    END LOOP;
    FOR role IN
        SELECT grantee::regrole FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = '{schema}.drop_sent_day(date, boolean, boolean)'::regprocedure
            AND grantee NOT IN (0, proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.empty_segment(bigint, boolean, boolean),
            {schema}.drop_segment() TO %s', role);
    END LOOP;
END $do$;
"""

# Nothing of the log is lost: sent rows go to their days, and with a row that is not sent there is no way back.
DOWN = """
ALTER TABLE ONLY {schema}.message ALTER COLUMN state SET DEFAULT 'pending';
LOCK TABLE {schema}.message, {schema}.receipt IN ACCESS EXCLUSIVE MODE;
DO $do$
DECLARE
    unsent CONSTANT bigint := (
        SELECT count(*) FROM {schema}.message_log
        WHERE NOT EXISTS (
            SELECT FROM (SELECT unnest(ids) AS id FROM {schema}.receipt) AS named WHERE named.id = message_log.id));
BEGIN
    IF unsent > 0 THEN
        RAISE EXCEPTION '% messages of the log are not sent', unsent
            USING HINT = 'set the default of message.state to pending, and let the relay send them first',
                ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    PERFORM {schema}.leave_log(-9223372036854775808);
END $do$;

DROP FUNCTION {schema}.drop_segment();
DROP FUNCTION {schema}.empty_segment(bigint, boolean, boolean);
DROP FUNCTION {schema}.segment_needed(timestamptz, timestamptz, boolean);
DROP FUNCTION {schema}.cut_segment();
DROP FUNCTION {schema}.ensure_segments(integer, bigint);
DROP FUNCTION {schema}.change_far(bigint, bigint, bigint);
DROP TRIGGER keep_ids ON {schema}.message;
DROP FUNCTION {schema}.keep_ids();
DROP FUNCTION {schema}.leap_over_settled();
DROP FUNCTION {schema}.settled_to();
DROP FUNCTION {schema}.make_segment(bigint, bigint, bigint);
DROP FUNCTION {schema}.leave_log(bigint);
DROP FUNCTION {schema}.copy_rights(regclass, regclass);
DROP TABLE {schema}.checkpoint;
DROP TABLE {schema}.segment;
DROP TABLE {schema}.receipt;
DROP TABLE {schema}.message_log;
ALTER TABLE {schema}.archived_day DROP COLUMN emptied;
ALTER TABLE {schema}.message DROP COLUMN xid;
"""


def upgrade(schema: str) -> None:
    stored = ", ".join(MOVED)
    moved = stored.replace("state", "'sent'", 1).replace("sent_at", "named.sent_at")
    moved = ", ".join(
        column if column in {"'sent'", "named.sent_at"} else f"row.{column}" for column in moved.split(", ")
    )
    texts = {"schema": schema, "lanes": LANES, "stored": stored, "moved": moved}
    making = (LEAVE_LOG, MAKE_SEGMENT, LEAP_OVER_SETTLED, ENSURE_SEGMENTS, CUT_SEGMENT, EMPTY_SEGMENT, DROP_SEGMENT)
    for script in (AS_OWNER, LOG, *making, GRANTS, "RESET ROLE"):
        op.execute(script.format(**texts))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
