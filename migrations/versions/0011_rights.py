"""Make and drop days by functions of the tables' owner, bound the days that anybody can ask for, name a batch's writer.

An earlier config/roles.sql gave message_sent, processed_message, their days and two functions to outbox_retention.
This migration gives them back to the owner of message, and makes the functions as that role. It needs to be run by that
role, by a member of it and of outbox_retention, or by a superuser.

Lock: ACCESS EXCLUSIVE on batch for an instant. Also on message_sent and processed_message, with their days, if
they belong to another role than message, or an earlier release left a day half dropped.
The retention of release 0.1.0 drops nothing once the tables belong to another role than its own.
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

# A Spark job holds its rows of `batch` for as long as it writes: waited for first, while nothing else is locked.
TAKE_BATCH = "LOCK TABLE {schema}.batch IN ACCESS EXCLUSIVE MODE"

# Owner first: CREATE OR REPLACE keeps the owner of a function, who could then replace what consumers call.
# outbox_retention may have left other code, which must not get the rights of a new owner: it is refused.
GIVE_BACK = """
DO $do$
DECLARE
    table_owner CONSTANT name := (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = '{schema}.message'::regclass);
    parents CONSTANT regclass[] := ARRAY['{schema}.message_sent', '{schema}.processed_message'];
    ours CONSTANT text[] := ARRAY['ensure_sent_days(date,integer)', 'ensure_inbox_days(date,integer)'];
    retention CONSTANT oid := to_regrole('outbox_retention');
    planted text;
    part regclass;
    routine text;
BEGIN
    SELECT string_agg(name, ', ') INTO planted FROM (
        SELECT 'function ' || pg_proc.oid::regprocedure FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace AND proowner = retention
            AND pg_proc.oid <> ALL (ARRAY(SELECT to_regprocedure('{schema}.' || name) FROM unnest(ours) AS name))
        UNION ALL
        SELECT 'trigger ' || tgname || ' on ' || tgrelid::regclass
        FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
        WHERE relnamespace = '{schema}'::regnamespace AND relowner = retention AND NOT tgisinternal
        UNION ALL
        SELECT 'rule ' || rulename || ' on ' || ev_class::regclass
        FROM pg_rewrite JOIN pg_class ON pg_class.oid = ev_class
        WHERE relnamespace = '{schema}'::regnamespace AND relowner = retention AND relkind IN ('r', 'p')
        UNION ALL
        SELECT 'policy ' || polname || ' on ' || polrelid::regclass
        FROM pg_policy JOIN pg_class ON pg_class.oid = polrelid
        WHERE relnamespace = '{schema}'::regnamespace AND relowner = retention
        UNION ALL -- in a check, a default or an index; functions of PostgreSQL itself are not noted there
        SELECT 'call of ' || refobjid::regprocedure || ' in ' || pg_describe_object(classid, pg_depend.objid, objsubid)
        FROM pg_depend JOIN (
            SELECT oid, conrelid FROM pg_constraint UNION ALL SELECT oid, adrelid FROM pg_attrdef
            UNION ALL SELECT indexrelid, indrelid FROM pg_index
        ) AS part (objid, tableid) USING (objid) JOIN pg_class ON pg_class.oid = tableid
        WHERE refclassid = 'pg_proc'::regclass AND relnamespace = '{schema}'::regnamespace AND relowner = retention
            AND classid IN ('pg_constraint'::regclass, 'pg_attrdef'::regclass, 'pg_class'::regclass)
    ) AS found (name);
    IF planted IS NOT NULL THEN
        RAISE EXCEPTION 'role outbox_retention has made what is none of the outbox''s: %', planted
            USING HINT = 'look at it and drop it, then run `relay migrate` again', ERRCODE = 'insufficient_privilege';
    END IF;
    FOR part IN
        SELECT oid FROM pg_class
        WHERE relowner <> to_regrole(quote_ident(table_owner)) AND (oid = ANY (parents)
            OR oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (parents))
            OR relnamespace = '{schema}'::regnamespace AND relkind = 'r'
                AND obj_description(oid, 'pg_class') = 'outbox retention drops this day')
        ORDER BY relkind = 'p' DESC
    LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', part, table_owner);
    END LOOP;
    FOREACH routine IN ARRAY ours || 'ring()'::text LOOP
        EXECUTE format('ALTER FUNCTION {schema}.%s OWNER TO %I', routine, table_owner);
    END LOOP;
    IF retention IS NOT NULL THEN
        REVOKE CREATE ON SCHEMA {schema} FROM outbox_retention;
        REVOKE ALL ON {schema}.replay, {schema}.archived_day, {schema}.inbox_memory FROM outbox_retention;
    END IF;
    -- What follows is made by the owner of the tables, whichever role migrates: their functions run with his rights.
    PERFORM set_config('role', table_owner, true);
END $do$;
"""

# An earlier release dropped a day in steps, with a comment on it between them. It had checked the rows before.
FINISH_DROPS = """
DO $do$
DECLARE
    part record;
BEGIN
    FOR part IN
        SELECT pg_class.oid::regclass AS name, inhrelid IS NOT NULL AND NOT inhdetachpending AS is_attached
        FROM pg_class LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
        WHERE relnamespace = '{schema}'::regnamespace AND relkind = 'r'
            AND relname ~ '^(message_sent|processed_message)_[0-9]{{8}}$'
            AND obj_description(pg_class.oid, 'pg_class') = 'outbox retention drops this day'
    LOOP
        IF part.is_attached THEN
            EXECUTE format('COMMENT ON TABLE %s IS NULL', part.name);
        ELSE
            EXECUTE format('DROP TABLE %s', part.name);
        END IF;
    END LOOP;
END $do$;
"""

# These three run with the rights of the role that calls them, which is the owner inside of the functions below.
# make_day is for the owner alone, who makes by it a day that the limits of ensure_*_days refuse.
HELPERS = """
CREATE FUNCTION {schema}.lock_holders(VARIADIC tables regclass[]) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(string_agg(DISTINCT coalesce('session ' || pid
        || coalesce(' (' || nullif(application_name, '') || ')', ''), 'a prepared transaction'), ', '),
        'a session that has ended since')
    FROM pg_locks LEFT JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'relation' AND granted AND relation = ANY (tables) AND pid IS DISTINCT FROM pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
$$;

CREATE FUNCTION {schema}.attached_day(parent text, day date) RETURNS regclass
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT inhrelid::regclass FROM pg_inherits
    WHERE inhparent = to_regclass(format('%I.%I', '{schema}', parent)) AND NOT inhdetachpending
        AND inhrelid = to_regclass(format('%I.%I', '{schema}', parent || '_' || to_char(day, 'YYYYMMDD')))
$$;

CREATE FUNCTION {schema}.make_day(parent text, day date) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part CONSTANT text := parent || '_' || to_char(day, 'YYYYMMDD');
BEGIN
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.%I INCLUDING ALL)', '{schema}', part, '{schema}', parent);
    -- ATTACH takes SHARE UPDATE EXCLUSIVE on the parent. PARTITION OF would take ACCESS EXCLUSIVE, and stop the marks
    -- while it waits for a long reader.
    EXECUTE format(
        'ALTER TABLE %I.%I ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)', '{schema}', parent, '{schema}', part,
        to_char(day, 'YYYY-MM-DD 00:00:00+00'), to_char(day + 1, 'YYYY-MM-DD 00:00:00+00'));
    -- The functions that drop days need the owner's rights on them, also where a superuser makes one by hand.
    EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', '{schema}', part, (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = format('%I.%I', '{schema}', parent)::regclass));
END $$;

REVOKE EXECUTE ON FUNCTION {schema}.lock_holders(VARIADIC regclass[]), {schema}.attached_day(text, date),
    {schema}.make_day(text, date) FROM PUBLIC;
"""

# Rows are marked with the database's time, so no other day is ever needed than today's and the next.
# A table's lock in place of an advisory one, which any login could hold.
ENSURE_SENT_DAYS = """
CREATE OR REPLACE FUNCTION {schema}.ensure_sent_days(first date, days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today CONSTANT date := (now() AT TIME ZONE 'UTC')::date;
    made integer := 0;
BEGIN
    IF (first BETWEEN today - 1 AND today + 7 AND days BETWEEN 1 AND today + 8 - first) IS NOT TRUE THEN
        RAISE EXCEPTION 'days of sent rows are made from % to %, not % from % on', today - 1, today + 7, days, first
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR n IN 0 .. days - 1 LOOP
        CONTINUE WHEN {schema}.attached_day('message_sent', first + n) IS NOT NULL;
        LOCK TABLE ONLY {schema}.message_sent IN SHARE UPDATE EXCLUSIVE MODE;
        CONTINUE WHEN {schema}.attached_day('message_sent', first + n) IS NOT NULL; -- made while this call waited
        PERFORM {schema}.make_day('message_sent', first + n);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;
"""

# The row of inbox_memory is the lock between the sessions that make days and the one that drops a day. A session with
# a snapshot from before gets a serialization failure.
ENSURE_INBOX_DAYS = """
CREATE OR REPLACE FUNCTION {schema}.ensure_inbox_days(first date, days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    today CONSTANT date := (now() AT TIME ZONE 'UTC')::date;
    last CONSTANT date := today + 7;
    remembered date;
    day date;
    made integer := 0;
BEGIN
    SELECT greatest(since, today - 400) INTO STRICT remembered FROM {schema}.inbox_memory FOR UPDATE;
    FOR n IN 0 .. days - 1 LOOP
        day := first + n;
        CONTINUE WHEN {schema}.attached_day('processed_message', day) IS NOT NULL;
        IF day < remembered THEN
            RAISE EXCEPTION 'the inbox has no day %, and remembers only from % on', day, remembered
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = to_char(remembered, 'YYYY-MM-DD');
        ELSIF day > last THEN
            RAISE EXCEPTION 'the inbox has no day %, and takes messages up to %', day, last
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = to_char(last, 'YYYY-MM-DD'),
                    CONSTRAINT = 'inbox_last_day';
        END IF;
        PERFORM {schema}.make_day('processed_message', day);
        made := made + 1;
    END LOOP;
    RETURN made;
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'a day of the inbox could not be made within %: % locks it', current_setting('lock_timeout'),
        {schema}.lock_holders('{schema}.inbox_memory', '{schema}.processed_message')
        USING ERRCODE = 'lock_not_available';
END $$;
"""

# A replay selects what was sent before it was made. One that was interrupted can be resumed. A job of Spark holds its
# days shared (spark/outbox_spark/archiving/ledger.py). An archive must have the last rows, too: a clock that stepped
# back may have added some to a day that was over.
SENT_DAY_NEEDED = """
CREATE FUNCTION {schema}.sent_day_needed(day date, rows bigint, archived boolean) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $$
    SELECT coalesce(
        (SELECT 'replay ' || string_agg(id::text, ', ' ORDER BY id)
            || ' needs it: `relay replay --resume` or `relay replay cancel` ends that'
        FROM {schema}.replay
        WHERE state = 'open' AND coalesce((filter ->> 'since')::timestamptz, '-infinity') < sent_day_needed.day + 1
            AND least((filter ->> 'until')::timestamptz, made_at) > sent_day_needed.day),
        (SELECT 'the Spark job archive or replay reads it at this moment (session '
            || string_agg(pid::text, ', ') || ')'
        FROM pg_locks, hashtextextended('{schema}.day ' || to_char(sent_day_needed.day, 'YYYY-MM-DD'), 0) AS key
        WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid::bigint << 32 | objid::bigint = key
            AND pid <> pg_backend_pid()
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
        (SELECT CASE WHEN noted.day IS NULL THEN 'it is not archived: `outbox-spark archive` does that'
            WHEN noted.rows <> sent_day_needed.rows THEN 'it has ' || sent_day_needed.rows || ' rows and '
                || noted.rows || ' are archived: `outbox-spark archive --again` does that again' END
        FROM (VALUES (sent_day_needed.day)) AS this (day)
        LEFT JOIN {schema}.archived_day AS noted ON noted.day = this.day
        WHERE archived))
$$;
REVOKE EXECUTE ON FUNCTION {schema}.sent_day_needed(date, bigint, boolean) FROM PUBLIC;
"""

# First the day, which SHARE keeps as it was counted. Then the day alone, so that a reader of it is found before the
# parent is asked for. The parent last. Marks and consumers queue behind the request for the parent alone, for at most
# one lock_timeout in a row (docs/decisions/0027-drop-a-day-by-a-function.md).
DROP_DAYS = """
CREATE FUNCTION {schema}.drop_sent_day(
    day date, archived boolean, dry_run boolean, OUT rows bigint, OUT kept_by text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '150ms' AS $$
DECLARE
    part CONSTANT regclass := {schema}.attached_day('message_sent', day);
    is_free boolean := true;
    unfit bigint;
BEGIN
    IF part IS NULL OR (day < (now() AT TIME ZONE 'UTC')::date) IS NOT TRUE
            OR num_nulls(archived, dry_run) > 0 THEN
        RAISE EXCEPTION '% is no past day of sent rows, or null', day USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT dry_run THEN
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', part);
        is_free := pg_try_advisory_xact_lock(hashtextextended('{schema}.day ' || to_char(day, 'YYYY-MM-DD'), 0));
    END IF;
    EXECUTE format(
        'SELECT count(*), count(*) FILTER (WHERE state IS DISTINCT FROM %L OR sent_at IS NULL) FROM %s', 'sent', part)
        INTO rows, unfit;
    kept_by := CASE WHEN unfit > 0 THEN format('%s of its rows are not sent: look at %s', unfit, part)
        ELSE coalesce({schema}.sent_day_needed(day, rows, archived),
            CASE WHEN NOT is_free THEN 'a job of Spark read it a moment ago' END) END;
    IF dry_run OR kept_by IS NOT NULL THEN
        RETURN;
    END IF;
    FOR attempt IN REVERSE 10 .. 1 LOOP
        BEGIN
            -- Making a replay takes it shared (relay/operate/sent/job.py): it comes before this, and keeps the day, or
            -- after, and is then told from which day on there are rows.
            PERFORM pg_advisory_xact_lock(hashtextextended('{schema}.replay and retention', 0));
            kept_by := {schema}.sent_day_needed(day, rows, archived);
            IF kept_by IS NULL THEN
                EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', part);
                EXECUTE format('DROP TABLE %s', part);
            END IF;
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF attempt = 1 THEN
                RAISE;
            END IF;
        END;
        PERFORM pg_sleep(0.05 + random() * 0.2);
    END LOOP;
END $$;

-- What comes of the day once it is gone cannot be told from what was applied: it is not made again.
CREATE FUNCTION {schema}.drop_inbox_day(day date, dry_run boolean, OUT rows bigint, OUT kept_by text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '150ms' AS $$
DECLARE
    part CONSTANT regclass := {schema}.attached_day('processed_message', day);
BEGIN
    IF part IS NULL OR (day < (now() AT TIME ZONE 'UTC')::date) IS NOT TRUE OR dry_run IS NULL THEN
        RAISE EXCEPTION '% is no past day of the inbox, or null', day USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('SELECT count(*) FROM %s', part) INTO rows;
    IF dry_run THEN
        RETURN;
    END IF;
    FOR attempt IN REVERSE 10 .. 1 LOOP
        BEGIN
            UPDATE {schema}.inbox_memory SET since = greatest(since, day + 1);
            EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', part);
            EXECUTE format('DROP TABLE %s', part);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF attempt = 1 THEN
                RAISE;
            END IF;
        END;
        PERFORM pg_sleep(0.05 + random() * 0.2);
    END LOOP;
END $$;

REVOKE EXECUTE ON FUNCTION {schema}.drop_sent_day(date, boolean, boolean), {schema}.drop_inbox_day(date, boolean)
    FROM PUBLIC;
"""

# The role that wrote the row: a job that recognises the batch compares it with its role. Null: written before this.
# Nobody is granted INSERT or UPDATE on it. A role changes only the row_counts of its batches. A trigger and no
# row-level security: pg_dump by a role that only reads would refuse the table.
LEDGER = """
ALTER TABLE {schema}.batch ADD COLUMN written_as name;
ALTER TABLE {schema}.batch ALTER COLUMN written_as SET DEFAULT current_user;

CREATE FUNCTION {schema}.refuse_foreign_batch() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'batch % version % was written by role %, and % is no member of it',
        OLD.app_id, OLD.version, OLD.written_as, current_user USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER refuse_foreign_batch BEFORE UPDATE OF row_counts ON {schema}.batch FOR EACH ROW
    WHEN (OLD.written_as IS NOT NULL
        AND pg_has_role(to_regrole(quote_ident(OLD.written_as)), 'MEMBER') IS NOT TRUE)
    EXECUTE FUNCTION {schema}.refuse_foreign_batch();
DO $do$
DECLARE
    spark text;
BEGIN
    FOR spark IN
        SELECT DISTINCT grantee::regrole FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.batch'::regclass AND privilege_type = 'INSERT' AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('REVOKE INSERT ON {schema}.batch FROM %s', spark);
        EXECUTE format(
            'GRANT INSERT (app_id, version, partition, partitions, token, row_counts) ON {schema}.batch TO %s', spark);
    END LOOP;
END $do$;
"""

DOWN = """
DROP TRIGGER refuse_foreign_batch ON {schema}.batch;
DROP FUNCTION {schema}.refuse_foreign_batch();
ALTER TABLE {schema}.batch DROP COLUMN written_as;
DROP FUNCTION {schema}.drop_inbox_day(date, boolean);
DROP FUNCTION {schema}.drop_sent_day(date, boolean, boolean);
DROP FUNCTION {schema}.sent_day_needed(date, bigint, boolean);

CREATE OR REPLACE FUNCTION {schema}.ensure_sent_days(first date, days integer) RETURNS integer
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

CREATE OR REPLACE FUNCTION {schema}.ensure_inbox_days(first date, days integer) RETURNS integer
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

DROP FUNCTION {schema}.make_day(text, date);
DROP FUNCTION {schema}.attached_day(text, date);
DROP FUNCTION {schema}.lock_holders(VARIADIC regclass[]);
"""


def upgrade(schema: str) -> None:
    for script in (
        TAKE_BATCH,
        GIVE_BACK,
        FINISH_DROPS,
        HELPERS,
        ENSURE_SENT_DAYS,
        ENSURE_INBOX_DAYS,
        SENT_DAY_NEEDED,
        DROP_DAYS,
        LEDGER,
        "RESET ROLE",
    ):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
