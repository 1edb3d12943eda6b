"""Create the outbox: message and its partitions, nodes, Spark's ledger, the inbox.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("message", "processed_message", "batch", "node")

MESSAGE = """
CREATE SEQUENCE {schema}.message_id_seq AS bigint;

CREATE TABLE {schema}.message (
    -- The transaction gets its own id before the row gets one: between the two, the relay could neither see the row nor
    -- know that a writer is about to write it. Left to itself PostgreSQL takes them the other way round, a millisecond
    -- apart (tests/engine/test_tail.py, `a_writer_that_is_slow_between_id_and_insert`).
    id bigint NOT NULL DEFAULT (
        CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('{schema}.message_id_seq') END
    ),
    message_id uuid NOT NULL DEFAULT gen_random_uuid(),
    aggregate_type text NOT NULL,
    aggregate_id text,
    event_type text NOT NULL,
    exchange text,
    routing_key text,
    headers jsonb,
    content_type text,
    -- json, not jsonb: the text goes out byte for byte. Bytes that are not JSON have their own column,
    -- since a text literal in a bytea column is read in escape format and loses its backslashes.
    payload json,
    payload_bytes bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- The lane of the ordering key; without a key the rows spread over the lanes. Only the stored value
    -- counts, so a server whose hash differs would merely start a new distribution after a restore.
    lane smallint NOT NULL GENERATED ALWAYS AS (
        (coalesce(hashtextextended(aggregate_type || '/' || aggregate_id, 0), id) & 15)::smallint
    ) STORED,
    state text NOT NULL DEFAULT 'pending',
    attempts smallint NOT NULL DEFAULT 0,
    available_at timestamptz,
    last_error text,
    held_behind bigint,
    parked_at timestamptz,
    sent_at timestamptz,
    writer text,
    batch_id bigint,
    trace_context jsonb,
    CONSTRAINT message_one_payload CHECK (num_nonnulls(payload, payload_bytes) = 1),
    CONSTRAINT message_aggregate_type CHECK (aggregate_type <> '' AND octet_length(aggregate_type) <= 255),
    CONSTRAINT message_aggregate_id CHECK (aggregate_id <> '' AND octet_length(aggregate_id) <= 255),
    CONSTRAINT message_event_type CHECK (event_type <> '' AND octet_length(event_type) <= 255),
    CONSTRAINT message_exchange CHECK (octet_length(exchange) <= 255),
    CONSTRAINT message_routing_key CHECK (octet_length(routing_key) <= 255),
    CONSTRAINT message_content_type CHECK (octet_length(content_type) <= 255),
    CONSTRAINT message_headers CHECK (jsonb_typeof(headers) = 'object')
) PARTITION BY LIST (state);
ALTER SEQUENCE {schema}.message_id_seq OWNED BY {schema}.message.id;

-- Uncompressed out of line: the relay then reads the sizes without fetching the values, so that it can bound its
-- memory, and moving a row to its day costs no compressing (docs/decisions/0003-payloads-uncompressed.md).
ALTER TABLE {schema}.message ALTER COLUMN payload SET STORAGE EXTERNAL,
    ALTER COLUMN payload_bytes SET STORAGE EXTERNAL;

CREATE TABLE {schema}.message_pending PARTITION OF {schema}.message FOR VALUES IN ('pending')
    WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
          autovacuum_vacuum_insert_threshold = -1,
          autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
          autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX message_pending_lane_id ON {schema}.message_pending (lane, id);
CREATE INDEX message_pending_available_at ON {schema}.message_pending (available_at)
    WHERE available_at IS NOT NULL;

CREATE TABLE {schema}.message_parked PARTITION OF {schema}.message FOR VALUES IN ('parked');
CREATE UNIQUE INDEX message_parked_id ON {schema}.message_parked (id);
CREATE INDEX message_parked_key ON {schema}.message_parked (aggregate_type, aggregate_id, id);

-- What an operator gave up, kept with the reason: nothing is lost silently.
CREATE TABLE {schema}.message_discarded PARTITION OF {schema}.message FOR VALUES IN ('discarded');

-- No DEFAULT partition: with one, DETACH CONCURRENTLY is refused and retention would lock writers out.
CREATE TABLE {schema}.message_sent PARTITION OF {schema}.message FOR VALUES IN ('sent')
    PARTITION BY RANGE (sent_at);
"""

# ATTACH takes SHARE UPDATE EXCLUSIVE on message_sent; CREATE TABLE ... PARTITION OF would take
# ACCESS EXCLUSIVE and stop the marking while it waits for a long reader.
ENSURE_SENT_DAYS = """
CREATE FUNCTION {schema}.ensure_sent_days(first date, days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    day date;
    part text;
    made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('{schema}.ensure_sent_days', 0));
    FOR day IN SELECT first + n FROM generate_series(0, days - 1) AS n LOOP
        part := 'message_sent_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_inherits
            WHERE inhparent = to_regclass('{schema}.message_sent')
                AND inhrelid = to_regclass(format('%I.%I', '{schema}', part)));
        EXECUTE format('CREATE TABLE %I.%I (LIKE %I.message_sent INCLUDING ALL)', '{schema}', part, '{schema}');
        EXECUTE format(
            'ALTER TABLE %I.message_sent ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
            '{schema}', '{schema}', part,
            to_char(day, 'YYYY-MM-DD 00:00:00+00'), to_char(day + 1, 'YYYY-MM-DD 00:00:00+00'));
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;
-- It runs as its owner, who owns the table: not for everybody (config/roles.sql grants it to the relay).
REVOKE EXECUTE ON FUNCTION {schema}.ensure_sent_days(date, integer) FROM PUBLIC;
"""

# NOTIFY takes a lock over the whole cluster at commit, so a writer rings only while a relay sleeps.
# A sleeping relay holds the doorbell lock shared, and the writer cannot have it for itself.
# Two writers that test in the same instant may ring needlessly. A writer that tested before the relay fell asleep
# and commits after it has not rung: the relay finds its rows by polling (relay/engine/read/tail.py).
# Taken and given back in one expression: between two statements a cancel could leave the lock with the writer's
# session for good. Qualified names, not SET search_path, which costs each statement a few microseconds.
RING = """
CREATE FUNCTION {schema}.ring() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    doorbell CONSTANT bigint := pg_catalog.hashtextextended('{schema}.doorbell', 0);
BEGIN
    IF NOT (pg_catalog.pg_try_advisory_lock(doorbell) AND pg_catalog.pg_advisory_unlock(doorbell)) THEN
        PERFORM pg_catalog.pg_notify('{schema}.doorbell', '');
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER ring AFTER INSERT ON {schema}.message FOR EACH STATEMENT EXECUTE FUNCTION {schema}.ring();
"""

AROUND = """
CREATE TABLE {schema}.node (
    name text PRIMARY KEY,
    backend_pid integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now(),
    lanes smallint[] NOT NULL DEFAULT '{{}}',
    in_flight integer NOT NULL DEFAULT 0,
    published_total bigint NOT NULL DEFAULT 0,
    state text NOT NULL DEFAULT 'ok',
    reasons text[] NOT NULL DEFAULT '{{}}',
    version text NOT NULL
);

-- Spark's ledger: one row says that a batch (or, partition by partition, a part of it) is committed.
CREATE TABLE {schema}.batch (
    app_id text NOT NULL,
    version bigint NOT NULL,
    partition integer NOT NULL DEFAULT -1,
    partitions integer NOT NULL,
    token uuid NOT NULL,
    row_counts jsonb NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (app_id, version, partition)
);

CREATE TABLE {schema}.processed_message (
    consumer_name text NOT NULL,
    message_id uuid NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    business_key text,
    PRIMARY KEY (consumer_name, message_id)
);
"""

DOWN = """
DROP TABLE {schema}.processed_message;
DROP TABLE {schema}.batch;
DROP TABLE {schema}.node;
DROP TABLE {schema}.message;
DROP FUNCTION {schema}.ring();
DROP FUNCTION {schema}.ensure_sent_days(date, integer);
"""


def upgrade(schema: str) -> None:
    for script in (MESSAGE, ENSURE_SENT_DAYS, RING, AROUND):
        op.execute(script.format(schema=schema))
    op.execute(f"SELECT {schema}.ensure_sent_days((now() AT TIME ZONE 'UTC')::date, 3)")


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
