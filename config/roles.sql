-- Roles for the sides of the outbox, to be granted to the logins of your applications:
--     GRANT outbox_writer TO billing_app;
--     GRANT outbox_relay, outbox_retention TO relay;
--
-- Run it after `relay migrate`, as the owner of the tables who may also create roles; running it again is harmless.
-- For a schema other than `outbox`: sed 's/SCHEMA outbox\b/SCHEMA events/; s/\boutbox\./events./g' config/roles.sql
BEGIN;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY[
        'outbox_writer', 'outbox_spark', 'outbox_relay', 'outbox_retention', 'outbox_consumer'
    ] LOOP
        IF to_regrole(name) IS NULL THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA outbox TO outbox_writer, outbox_spark, outbox_relay, outbox_retention, outbox_consumer;

-- Writers: new rows, and these are pending, since `state` and what the relay writes are not theirs to name.
GRANT INSERT (
    message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
    payload, payload_bytes, available_at, writer, batch_id, trace_context
) ON outbox.message TO outbox_writer;
GRANT USAGE ON SEQUENCE outbox.message_id_seq TO outbox_writer;

-- Spark: writes as writers do, with the ledger; its staging tables have a schema of their own, which jobs name
-- by the option stagingSchema. The business table is yours to grant.
GRANT outbox_writer TO outbox_spark;
GRANT SELECT, INSERT ON outbox.batch TO outbox_spark;
CREATE SCHEMA IF NOT EXISTS outbox_staging;
GRANT USAGE, CREATE ON SCHEMA outbox_staging TO outbox_spark;

-- The relay and its operators: read, mark, park, retry; what an event says is not theirs to change.
GRANT SELECT ON outbox.message TO outbox_relay;
GRANT UPDATE (state, attempts, available_at, last_error, held_behind, parked_at, sent_at, quarantine)
    ON outbox.message TO outbox_relay;
GRANT SELECT, DELETE ON outbox.message_pending TO outbox_relay; -- a sent row moves to its day
GRANT INSERT ON outbox.message_sent TO outbox_relay;
GRANT SELECT ON SEQUENCE outbox.message_id_seq TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox.ensure_sent_days(date, integer) TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.node, outbox.quarantine TO outbox_relay;
GRANT SELECT ON outbox.batch, outbox.migration TO outbox_relay;
GRANT SELECT, INSERT ON outbox.replay, outbox.replay_failure TO outbox_relay;
GRANT UPDATE (state, selected, replayed, failed, position, saved_at) ON outbox.replay TO outbox_relay;
GRANT SELECT ON outbox.processed_message TO outbox_relay; -- relay reconcile, where the inbox is here
-- To see how old other people's transactions are (docs/database.md); only a superuser may grant it:
--     GRANT pg_read_all_stats TO outbox_relay;

-- Consumers: their inbox.
GRANT SELECT, INSERT ON outbox.processed_message TO outbox_consumer;

-- Retention: only the owner of a partition may detach and drop it. So the days of sent rows get an owner of their own, who
-- can do as he likes with sent rows and with nothing else. For the relay's login, or with relay.retention = "off" for one
-- that runs `relay retention` each night. The tables' owner becomes a member, so that migrations go on as before.
GRANT CREATE ON SCHEMA outbox TO outbox_retention;
GRANT SELECT ON outbox.migration, outbox.replay TO outbox_retention;

-- The last step, since a new owner takes ACCESS EXCLUSIVE on message_sent until COMMIT: marks wait for it, once.
SET LOCAL lock_timeout = '3s';
DO $$
DECLARE
    sent CONSTANT regclass := 'outbox.message_sent';
    part regclass;
BEGIN
    EXECUTE format('GRANT outbox_retention TO %I', (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'outbox.message'::regclass));
    FOR part IN
        SELECT oid FROM pg_class
        WHERE (oid = sent OR oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = sent))
            AND relowner <> to_regrole('outbox_retention')
        ORDER BY oid <> sent
    LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO outbox_retention', part);
    END LOOP;
END $$;
ALTER FUNCTION outbox.ensure_sent_days(date, integer) OWNER TO outbox_retention;

COMMIT;
