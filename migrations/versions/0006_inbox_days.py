"""Divide the inbox into days, so that what it need not remember any longer can be dropped by the day.

Lock: ACCESS EXCLUSIVE on processed_message while its rows are copied, so consumers wait: 10 to 15 s for a million rows.
message is read once, to tell the days. New and old rows are both there until it commits.
Consumers must be of the release that brings it.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("inbox_memory",)

# A unique key over days needs the day to be a property of the message, not of the moment when it is applied. Each
# repeat then meets the row that the first one has left (docs/decisions/0012-an-inbox-by-the-day-of-the-message.md).
INBOX = """
ALTER TABLE {schema}.processed_message RENAME TO processed_message_undivided;
ALTER INDEX {schema}.processed_message_pkey RENAME TO processed_message_undivided_pkey;

CREATE TABLE {schema}.processed_message (
    consumer_name text NOT NULL,
    message_id uuid NOT NULL,
    message_day date NOT NULL, -- the day (UTC) of the message's timestamp, which tells when its row was written
    processed_at timestamptz NOT NULL DEFAULT now(),
    business_key text,
    PRIMARY KEY (consumer_name, message_id, message_day)
) PARTITION BY RANGE (message_day);

-- For messages without a timestamp, which are of 1970-01-01 here: nobody knows when one comes again, so it stays.
CREATE TABLE {schema}.processed_message_undated PARTITION OF {schema}.processed_message
    FOR VALUES FROM (MINVALUE) TO ('1970-01-02');

-- One row: from which day on the inbox remembers all that was applied. A day before may still be there; it is never
-- made again, or what was applied on it would be taken for new.
CREATE TABLE {schema}.inbox_memory (
    since date NOT NULL,
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only)
);
INSERT INTO {schema}.inbox_memory VALUES ('1970-01-02');
"""

# The row of inbox_memory is the lock between all sessions that make days and the one that drops one. Its holder reads
# what the last one has committed, or, with a snapshot from before, is told that it cannot be serialized.
# ATTACH, not PARTITION OF: see ensure_sent_days.
ENSURE_INBOX_DAYS = """
CREATE FUNCTION {schema}.ensure_inbox_days(first date, days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    remembered date;
    day date;
    part text;
    made integer := 0;
BEGIN
    SELECT since INTO STRICT remembered FROM {schema}.inbox_memory FOR UPDATE;
    FOR day IN SELECT first + n FROM generate_series(0, days - 1) AS n LOOP
        part := 'processed_message_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_inherits
            WHERE inhparent = to_regclass('{schema}.processed_message') AND NOT inhdetachpending
                AND inhrelid = to_regclass(format('%I.%I', '{schema}', part)));
        IF day < remembered THEN
            RAISE EXCEPTION 'the inbox has no day %, and remembers only from % on', day, remembered
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = to_char(remembered, 'YYYY-MM-DD');
        END IF;
        EXECUTE format('CREATE TABLE %I.%I (LIKE %I.processed_message INCLUDING ALL)', '{schema}', part, '{schema}');
        EXECUTE format(
            'ALTER TABLE %I.processed_message ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
            '{schema}', '{schema}', part, to_char(day, 'YYYY-MM-DD'), to_char(day + 1, 'YYYY-MM-DD'));
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;
-- It runs as its owner, who owns the table: not for everybody (config/roles.sql grants it to consumers).
REVOKE EXECUTE ON FUNCTION {schema}.ensure_inbox_days(date, integer) FROM PUBLIC;
"""

# The day as the relay says it: created_at within what AMQP's timestamps are read as. Where the row of a message is not
# here, or no longer, the day when it was applied is the nearest that is known.
MOVE = """
CREATE UNLOGGED TABLE {schema}.processed_message_dated AS
    SELECT entry.*, (least(greatest(coalesce(row.created_at, entry.processed_at), to_timestamp(0)),
        to_timestamp(4294967295)) AT TIME ZONE 'UTC')::date AS message_day
    FROM {schema}.processed_message_undivided AS entry
    LEFT JOIN {schema}.message AS row USING (message_id);
SELECT {schema}.ensure_inbox_days(message_day, 1)
    FROM {schema}.processed_message_dated WHERE message_day > '1970-01-01' GROUP BY message_day;
INSERT INTO {schema}.processed_message (consumer_name, message_id, message_day, processed_at, business_key)
    SELECT consumer_name, message_id, message_day, processed_at, business_key FROM {schema}.processed_message_dated
    ON CONFLICT DO NOTHING; -- of several rows with one message id and day
DROP TABLE {schema}.processed_message_dated, {schema}.processed_message_undivided;
SELECT {schema}.ensure_inbox_days((now() AT TIME ZONE 'UTC')::date, 3);
"""

DOWN = """
ALTER TABLE {schema}.processed_message RENAME TO processed_message_divided;
ALTER INDEX {schema}.processed_message_pkey RENAME TO processed_message_divided_pkey;
CREATE TABLE {schema}.processed_message (
    consumer_name text NOT NULL,
    message_id uuid NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    business_key text,
    PRIMARY KEY (consumer_name, message_id)
);
INSERT INTO {schema}.processed_message (consumer_name, message_id, processed_at, business_key)
    SELECT consumer_name, message_id, processed_at, business_key FROM {schema}.processed_message_divided
    ORDER BY processed_at
    ON CONFLICT DO NOTHING;
DROP TABLE {schema}.processed_message_divided, {schema}.inbox_memory;
DROP FUNCTION {schema}.ensure_inbox_days(date, integer);
"""


def upgrade(schema: str) -> None:
    for script in (INBOX, ENSURE_INBOX_DAYS, MOVE):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
