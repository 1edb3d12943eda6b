-- Roles for the sides of the outbox, to be granted to the logins of your applications:
--     GRANT outbox_writer TO billing_app;
--
-- Run it after `relay migrate`, as the owner of the tables who may also create roles; running it again is harmless.
-- For a schema other than `outbox`: sed 's/SCHEMA outbox\b/SCHEMA events/; s/\boutbox\./events./g' config/roles.sql
BEGIN;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['outbox_writer', 'outbox_spark', 'outbox_relay', 'outbox_consumer'] LOOP
        IF to_regrole(name) IS NULL THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA outbox TO outbox_writer, outbox_spark, outbox_relay, outbox_consumer;

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

COMMIT;
