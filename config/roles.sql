-- Roles for the sides of the outbox, to be granted to the logins of your applications:
--     GRANT outbox_writer TO billing_app;
--     GRANT outbox_relay, outbox_retention TO relay;
--
-- Run it after `relay migrate`. The role that runs it needs: the ownership of the tables and of their schema, CREATEROLE,
-- and CREATE on the database (for the schema outbox_staging). A superuser has all of it. Run it again after an update, and
-- after a restore: pg_restore brings the tables, and not the roles. It is harmless at any time.
--
-- For a schema other than `outbox`: relay config roles --schema events
-- The roles are then events_writer and so on: two schemas share no role, and so they share no rights.
--
-- The roles part the sides from each other. Within a side they part nothing: every login with outbox_consumer can read,
-- delete and forge what another consumer of this schema holds and remembers, and so make its messages be lost. Consumers
-- that do not trust each other get a schema each (docs/database.md, Rights).
BEGIN;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY[
        'outbox_writer', 'outbox_publisher', 'outbox_spark', 'outbox_relay', 'outbox_retention', 'outbox_archive',
        'outbox_consumer', 'outbox_console'
    ] LOOP
        IF to_regrole(name) IS NULL THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA outbox
    TO outbox_writer, outbox_publisher, outbox_spark, outbox_relay, outbox_retention, outbox_archive, outbox_consumer,
    outbox_console;

-- Take back what an earlier version of this script gave: INSERT also into columns that the table itself writes.
REVOKE INSERT ON outbox.job, outbox.operator_audit, outbox.dead_letter_audit, outbox.archived_day
    FROM outbox_relay, outbox_console, outbox_retention, outbox_archive;

-- These functions run with the rights of the tables' owner. `pg_restore --no-acl` makes them again for everybody.
REVOKE EXECUTE ON FUNCTION outbox.ensure_sent_days(date, integer), outbox.ensure_inbox_days(date, integer),
    outbox.drop_sent_day(date, boolean, boolean), outbox.drop_inbox_day(date, boolean), outbox.note_parked(),
    outbox.forget_failures(integer), outbox.forget_batches(integer, boolean),
    outbox.give_up_batch(text, bigint, text, text), outbox.guard_batch(), outbox.note_released(),
    outbox.send_edited(bigint, uuid, json, bytea, jsonb, text, text) FROM PUBLIC;

-- Writers: new rows, and these are pending, since `state` and what the relay writes are not theirs to name.
GRANT INSERT (
    message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
    payload, payload_bytes, available_at, writer, batch_id, trace_context
) ON outbox.message TO outbox_writer;
GRANT USAGE ON SEQUENCE outbox.message_id_seq TO outbox_writer;

-- Durable publishers: write as writers do, name the time at which an event was accepted, and see whether rows of theirs
-- are left. One that runs a relay in its process needs the relay's roles, too.
GRANT outbox_writer TO outbox_publisher;
GRANT INSERT (created_at), SELECT (state, writer, created_at) ON outbox.message TO outbox_publisher;
GRANT SELECT (state, writer, created_at) ON outbox.message_state TO outbox_publisher;

-- Spark: writes as writers do, with the ledger; its staging tables have a separate schema, which jobs name
-- by the option stagingSchema. The business table is yours to grant. The column written_as of the ledger is for nobody to
-- write: a job compares it with its own role, so it does not take the batch of another job for its own.
GRANT outbox_writer TO outbox_spark;
REVOKE INSERT ON outbox.batch FROM outbox_spark;
GRANT SELECT, INSERT (app_id, version, partition, partitions, token, row_counts), UPDATE (row_counts)
    ON outbox.batch TO outbox_spark;
GRANT SELECT (state) ON outbox.message TO outbox_spark;
GRANT SELECT (state) ON outbox.message_state TO outbox_spark; -- to wait while many are pending
CREATE SCHEMA IF NOT EXISTS outbox_staging;
GRANT USAGE, CREATE ON SCHEMA outbox_staging TO outbox_spark;

-- Archive: reads the outbox, and notes which days it has written elsewhere.
GRANT SELECT ON outbox.message, outbox.message_count, outbox.message_state TO outbox_archive;
GRANT SELECT, INSERT (day, rows, checksum, path), DELETE ON outbox.archived_day TO outbox_archive;
GRANT EXECUTE ON FUNCTION outbox.sent(timestamp with time zone, timestamp with time zone) TO outbox_archive;

-- The relay and its operators: read, mark, park, retry, reroute; what an event says is not theirs to change.
GRANT SELECT ON outbox.message, outbox.message_count, outbox.message_state TO outbox_relay;
GRANT UPDATE (state, attempts, available_at, last_error, held_behind, parked_at, sent_at, quarantine)
    ON outbox.message TO outbox_relay;
GRANT UPDATE (exchange, routing_key) ON outbox.message TO outbox_relay; -- relay quarantine reroute
GRANT SELECT, DELETE ON outbox.message_pending TO outbox_relay; -- a sent row moves to its day
GRANT INSERT ON outbox.message_sent TO outbox_relay;
GRANT SELECT ON SEQUENCE outbox.message_id_seq TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox.ensure_sent_days(date, integer) TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox.sent(timestamp with time zone, timestamp with time zone) TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.node, outbox.quarantine TO outbox_relay;
GRANT SELECT ON outbox.quarantine_released TO outbox_relay; -- a trigger writes it
GRANT SELECT, INSERT, UPDATE ON outbox.lane_floor TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON outbox.lane_pause TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON outbox.published TO outbox_relay;
GRANT SELECT ON outbox.batch, outbox.migration TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox.give_up_batch(text, bigint, text, text) TO outbox_relay; -- relay batches give-up
GRANT EXECUTE ON FUNCTION outbox.send_edited(bigint, uuid, json, bytea, jsonb, text, text)
    TO outbox_relay; -- relay parked edit
GRANT SELECT ON outbox.archived_day TO outbox_relay; -- the metric of days that are not archived
GRANT SELECT ON outbox.job TO outbox_relay;
GRANT INSERT (kind, source, made_by, why, filter, to_exchange, routing_key, selected, rate, stages, stop_when_failing)
    ON outbox.job TO outbox_relay; -- not by_console: a console does such jobs with its own rights
GRANT SELECT, INSERT ON outbox.job_failure TO outbox_relay;
GRANT UPDATE (state, selected, done, failed, released, stage, position, saved_at, paused_because, watched, waiting,
    scanned, to_scan, began_at, began_with) ON outbox.job TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON outbox.job_row TO outbox_relay;
GRANT SELECT, INSERT ON outbox.failure TO outbox_relay;
GRANT UPDATE (retried) ON outbox.failure TO outbox_relay;
GRANT SELECT ON outbox.parked_failure TO outbox_relay; -- a trigger writes it
GRANT SELECT (position, consumer_name, key, message_id, event_type, exchange, routing_key, held_at, attempts, begun,
    first_failed_at, last_failed_at, due_at, exception, error, reason)
    ON outbox.held_message TO outbox_relay; -- relay failures, where the inbox is here: all but what a message says
GRANT UPDATE (due_at) ON outbox.held_message TO outbox_relay; -- relay held retry
GRANT SELECT ON outbox.processed_message, outbox.consumer_queue TO outbox_relay; -- relay reconcile, where the inbox is here
-- Masters of partitioned consumers, where their inbox is here.
GRANT SELECT ON outbox.pool, outbox.pool_member, outbox.pool_partition TO outbox_relay;
GRANT DELETE ON outbox.pool_member TO outbox_relay;
GRANT UPDATE (epoch, member, wanted_by, taken_from, since) ON outbox.pool_partition TO outbox_relay;
GRANT SELECT, INSERT, UPDATE ON outbox.pool_master TO outbox_relay;
-- To see how old other people's transactions are (docs/database.md); only a superuser may grant it:
--     GRANT pg_read_all_stats TO outbox_relay;

-- Consumers: their inbox and its days, the messages that they hold, and the tries that have not ended.
GRANT SELECT, INSERT ON outbox.processed_message TO outbox_consumer;
GRANT EXECUTE ON FUNCTION outbox.ensure_inbox_days(date, integer) TO outbox_consumer;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.held_message, outbox.begun_message TO outbox_consumer;
GRANT SELECT, INSERT, UPDATE ON outbox.consumer_queue TO outbox_consumer; -- what it consumes, for relay reconcile
-- Members of a pool: check in and out, and release a partition.
GRANT SELECT, INSERT, UPDATE ON outbox.pool TO outbox_consumer;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.pool_member TO outbox_consumer;
GRANT SELECT, INSERT, UPDATE (member, taken_from) ON outbox.pool_partition TO outbox_consumer;

-- The console: sees what the relay sees and what consumers hold, and does what operators do. It carries no rows: it can
-- neither mark a row as sent nor take one away, and be neither a relay nor the master of a pool.
GRANT SELECT ON outbox.message, outbox.message_count, outbox.message_state TO outbox_console;
GRANT UPDATE (state, attempts, available_at, last_error, held_behind, parked_at, quarantine, exchange, routing_key)
    ON outbox.message TO outbox_console;
GRANT SELECT ON SEQUENCE outbox.message_id_seq TO outbox_console;
GRANT EXECUTE ON FUNCTION outbox.sent(timestamp with time zone, timestamp with time zone) TO outbox_console;
GRANT SELECT ON outbox.node, outbox.published, outbox.batch, outbox.migration, outbox.archived_day TO outbox_console;
GRANT EXECUTE ON FUNCTION outbox.give_up_batch(text, bigint, text, text) TO outbox_console;
GRANT EXECUTE ON FUNCTION outbox.send_edited(bigint, uuid, json, bytea, jsonb, text, text) TO outbox_console;
GRANT SELECT, INSERT, UPDATE ON outbox.quarantine TO outbox_console;
GRANT SELECT ON outbox.quarantine_released TO outbox_console; -- a trigger writes it
GRANT SELECT, INSERT, DELETE ON outbox.lane_pause TO outbox_console;
GRANT SELECT ON outbox.job TO outbox_console;
GRANT INSERT (kind, source, made_by, why, filter, to_exchange, routing_key, selected, rate, stages, stop_when_failing,
    by_console) ON outbox.job TO outbox_console;
GRANT SELECT, INSERT ON outbox.job_failure TO outbox_console;
GRANT UPDATE (state, selected, done, failed, released, stage, position, saved_at, paused_because, watched, waiting,
    scanned, to_scan, began_at, began_with) ON outbox.job TO outbox_console;
GRANT SELECT, INSERT, DELETE ON outbox.job_row TO outbox_console;
GRANT SELECT, INSERT ON outbox.failure TO outbox_console;
GRANT UPDATE (retried) ON outbox.failure TO outbox_console;
GRANT SELECT ON outbox.parked_failure TO outbox_console; -- a trigger writes it
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.api_answer, outbox.console_history TO outbox_console;
GRANT SELECT ON outbox.processed_message, outbox.held_message, outbox.begun_message, outbox.consumer_queue
    TO outbox_console;
GRANT UPDATE (due_at) ON outbox.held_message TO outbox_console;
GRANT SELECT ON outbox.pool, outbox.pool_member, outbox.pool_partition, outbox.pool_master TO outbox_console;

-- Retention: drops days, forgets causes of failures and batches of Spark by functions of the tables' owner, and owns
-- nothing. For the relay's login, or with relay.retention = "off" for one that runs `relay retention` each night.
GRANT EXECUTE ON FUNCTION outbox.drop_sent_day(date, boolean, boolean), outbox.drop_inbox_day(date, boolean),
    outbox.forget_failures(integer), outbox.forget_batches(integer, boolean) TO outbox_retention;
GRANT SELECT ON outbox.migration TO outbox_retention;

-- The audits: what was done, by whom, and why. Which login did it, and when, the table itself writes.
GRANT SELECT ON outbox.operator_audit, outbox.dead_letter_audit TO outbox_relay, outbox_console;
GRANT INSERT (command, target, done_by, why, job) ON outbox.operator_audit TO outbox_relay, outbox_console;
GRANT INSERT (command, target, done_by, why) ON outbox.operator_audit TO outbox_retention; -- relay retention, by hand
GRANT INSERT (command, queue, sent_to, done_by, why, job, message_id, event_type, key, reason, last_failed_at)
    ON outbox.dead_letter_audit TO outbox_relay, outbox_console;

-- Take back what an earlier version of this script gave to outbox_retention. The last step: a new owner takes ACCESS
-- EXCLUSIVE on message_sent and processed_message until COMMIT, and marks and consumers wait for it, once.
REVOKE CREATE ON SCHEMA outbox FROM outbox_retention;
REVOKE ALL ON outbox.job, outbox.replay, outbox.archived_day, outbox.inbox_memory FROM outbox_retention;
SET LOCAL lock_timeout = '3s';
DO $$
DECLARE
    table_owner CONSTANT name := (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'outbox.message'::regclass);
    part regclass;
    planted text;
BEGIN
    FOR part IN
        SELECT oid FROM pg_class
        WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p')
            AND relowner = to_regrole('outbox_retention')
        ORDER BY relkind = 'p' DESC
    LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', part, table_owner);
    END LOOP;
    SELECT string_agg(oid::regprocedure::text, ', ') INTO planted FROM pg_proc
    WHERE pronamespace = 'outbox'::regnamespace AND proowner = to_regrole('outbox_retention');
    IF planted IS NOT NULL THEN
        RAISE EXCEPTION 'role outbox_retention owns functions, and may have put other code into them: %', planted
            USING HINT = 'look at them; `relay migrate` makes those of the outbox again';
    END IF;
END $$;

COMMIT;
