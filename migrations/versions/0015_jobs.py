"""Group what failed by its cause, let one table of jobs hold all bulk work, and set parked rows aside.

`failure` names the causes, `parked_failure` says which parked row has which. A trigger writes both, so that rows
that an older relay parks are grouped, too. `replay` becomes `job`. Views of the old names serve older releases.

Made as the owner of the tables, whichever role migrates. Roles that may read, make or run replays may do so with jobs.

The rows that are parked get their causes first, which takes 45 s for a million and locks nothing. Then come the locks
and the rows that were parked, changed or released meanwhile.

Lock: ACCESS EXCLUSIVE on replay, replay_failure, operator_audit, dead_letter_audit and message_count. SHARE ROW
EXCLUSIVE on message_parked. SHARE UPDATE EXCLUSIVE on message. All for 2 s at a million parked rows. Relays park no row
meanwhile, and send the others.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("failure", "parked_failure", "job", "job_row", "job_failure")  # replays go back to their old tables

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# relay/failures/cause.py has the same steps; tests/failures/test_cause.py compares. A reply code keeps its number.
CAUSE = r"""
CREATE FUNCTION {schema}.failure_cause(words text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(nullif(btrim(
    regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
        left(words, 500),
        '[ \t\r\n]+', ' ', 'g'),
        '[0-9A-Fa-f]{{8}}(-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}}', '*', 'g'),
        '(?<![A-Za-z0-9])''[^'']*''', '''*''', 'g'),
        '(?<![A-Za-z0-9])"[^"]*"', '"*"', 'g'),
        '(?<![A-Za-z0-9])`[^`]*`', '`*`', 'g'),
        '[A-Za-z0-9_]*[0-9][A-Za-z0-9_]*(?![A-Za-z0-9_]| [A-Z]+_[A-Z])', '*', 'g'),
        '[*]([-.:/+,][*])+', '*', 'g'),
    ' '), ''), 'no reason');

CREATE FUNCTION {schema}.failure_group(source text, cause text, event_type text, place text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN left(encode(sha256(convert_to(
    concat_ws(E'\x1f', source, cause, coalesce(event_type, ''), coalesce(place, '')), 'UTF8')), 'hex'), 12);
"""

FAILURES = """
CREATE TABLE {schema}.failure (
    id text PRIMARY KEY, -- as failure_group makes it
    source text NOT NULL, -- parked, dead letter, held, quarantine
    cause text NOT NULL,
    event_type text NOT NULL,
    place text NOT NULL, -- exchange, or queue
    retried bigint NOT NULL DEFAULT 0, -- messages, by operators
    seen_at timestamptz NOT NULL DEFAULT now() -- the first time
);

CREATE TABLE {schema}.parked_failure (
    id bigint PRIMARY KEY, -- of the row of message_parked
    failure text NOT NULL,
    held_behind bigint,
    parked_at timestamptz
);
CREATE INDEX parked_failure_failure ON {schema}.parked_failure (failure, id);

-- With its owner's rights: who parks a row needs none on these two tables.
CREATE FUNCTION {schema}.note_parked() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    cause text;
    named text;
BEGIN
    IF TG_OP = 'DELETE' THEN
        DELETE FROM {schema}.parked_failure WHERE id = OLD.id;
        RETURN NULL;
    END IF;
    cause := {schema}.failure_cause(NEW.last_error);
    named := {schema}.failure_group('parked', cause, NEW.event_type, NEW.exchange);
    INSERT INTO {schema}.failure (id, source, cause, event_type, place)
        SELECT named, 'parked', cause, NEW.event_type, coalesce(NEW.exchange, '')
        WHERE NOT EXISTS (SELECT FROM {schema}.failure WHERE id = named)
        ON CONFLICT DO NOTHING;
    INSERT INTO {schema}.parked_failure AS noted (id, failure, held_behind, parked_at)
        VALUES (NEW.id, named, NEW.held_behind, NEW.parked_at)
        ON CONFLICT (id) DO UPDATE SET failure = EXCLUDED.failure, held_behind = EXCLUDED.held_behind,
            parked_at = EXCLUDED.parked_at;
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.note_parked() FROM PUBLIC;
"""

# `version` tells whether a row was changed since.
SEEN = """
CREATE TABLE {schema}.parked_seen AS
    SELECT id, xmin AS version, {schema}.failure_cause(last_error) AS cause, event_type,
        coalesce(exchange, '') AS place, held_behind, parked_at
    FROM {schema}.message_parked;
"""

CAUSES_OF_SEEN = """
INSERT INTO {schema}.failure (id, source, cause, event_type, place)
SELECT DISTINCT {schema}.failure_group('parked', cause, event_type, place), 'parked', cause, event_type, place
FROM {schema}.parked_seen
ON CONFLICT DO NOTHING;
INSERT INTO {schema}.parked_failure (id, failure, held_behind, parked_at)
SELECT id, {schema}.failure_group('parked', cause, event_type, place), held_behind, parked_at FROM {schema}.parked_seen;
"""

# From here on nobody parks a row, or releases one.
SINCE = """
CREATE TRIGGER note_parked AFTER INSERT OR DELETE OR UPDATE OF held_behind, last_error ON {schema}.message_parked
    FOR EACH ROW EXECUTE FUNCTION {schema}.note_parked();

DELETE FROM {schema}.parked_failure AS noted
USING {schema}.parked_seen AS seen
WHERE noted.id = seen.id AND NOT EXISTS (
    SELECT FROM {schema}.message_parked AS row WHERE row.id = seen.id AND row.xmin = seen.version
);
DROP TABLE {schema}.parked_seen;
CREATE TABLE {schema}.parked_seen AS
    SELECT id, {schema}.failure_cause(last_error) AS cause, event_type, coalesce(exchange, '') AS place, held_behind,
        parked_at
    FROM {schema}.message_parked AS row
    WHERE NOT EXISTS (SELECT FROM {schema}.parked_failure AS noted WHERE noted.id = row.id);
"""

# Set aside by an operator: neither sent nor deleted, and restorable.
ARCHIVED = """
CREATE TABLE {schema}.message_archived (LIKE {schema}.message INCLUDING ALL);
CREATE UNIQUE INDEX message_archived_id ON {schema}.message_archived (id);
ALTER TABLE {schema}.message ATTACH PARTITION {schema}.message_archived FOR VALUES IN ('archived');

CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded
    UNION ALL SELECT 'archived', count(*) FROM {schema}.message_archived;
"""

JOBS = """
ALTER TABLE {schema}.replay RENAME TO job;
ALTER TABLE {schema}.job RENAME COLUMN replayed TO done;
ALTER TABLE {schema}.job DROP CONSTRAINT replay_state;
ALTER TABLE {schema}.job
    ADD COLUMN kind text NOT NULL DEFAULT 'replay', -- the default is for the view `replay`
    ADD COLUMN source text NOT NULL DEFAULT 'sent', -- which rows or letters its filter means
    ADD COLUMN why text,
    ADD COLUMN released bigint NOT NULL DEFAULT 0, -- rows that went along, from behind those that were done
    ADD COLUMN rate double precision, -- rows a second at most
    ADD COLUMN stages bigint[], -- after how many rows it waits for their outcome
    ADD COLUMN stage integer NOT NULL DEFAULT 0, -- how many of the stages have ended
    ADD COLUMN stop_when_failing double precision, -- the share of a stage that ends in a pause
    ADD COLUMN paused_because text,
    ADD CONSTRAINT job_state CHECK (state IN ('open', 'paused', 'done', 'cancelled')),
    ADD CONSTRAINT job_kind CHECK (kind IN ('replay', 'retry', 'discard', 'archive', 'restore')),
    ADD CONSTRAINT job_source CHECK (source IN ('sent', 'parked', 'archived', 'dead letter')),
    ADD CONSTRAINT job_stages CHECK (stages IS NULL OR cardinality(stages) > 0);
ALTER TABLE {schema}.replay_failure RENAME TO job_failure;
ALTER TABLE {schema}.job_failure RENAME COLUMN replay_id TO job_id;

-- The rows of a stage, until their outcome is known.
CREATE TABLE {schema}.job_row (
    job_id bigint NOT NULL REFERENCES {schema}.job ON DELETE CASCADE,
    id bigint NOT NULL,
    lane smallint NOT NULL,
    PRIMARY KEY (job_id, id)
);

-- For a release that knows no jobs. Both views can be written.
CREATE VIEW {schema}.replay AS
    SELECT id, made_at, made_by, made_as, filter, to_exchange, routing_key, state, selected, done AS replayed, failed,
        position, saved_at
    FROM {schema}.job WHERE kind = 'replay';
CREATE VIEW {schema}.replay_failure AS
    SELECT job_id AS replay_id, id, message_id, reason, failed_at FROM {schema}.job_failure;

ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command, ADD COLUMN job bigint,
    ADD CONSTRAINT operator_audit_command CHECK (command IN (
        'parked retry', 'parked discard', 'parked archive', 'parked restore', 'quarantine reroute',
        'quarantine discard', 'replay cancel', 'jobs pause', 'jobs resume', 'jobs cancel', 'retention'
    )) NOT VALID;
ALTER TABLE {schema}.dead_letter_audit ADD COLUMN job bigint;
CREATE INDEX dead_letter_audit_job ON {schema}.dead_letter_audit (job, id) WHERE job IS NOT NULL;
"""

# A role that could read, make and run replays can do so with jobs, before the roles are made again.
GRANTS = """
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT relname, grantee::regrole AS role, privilege_type AS privilege FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid IN ('{schema}.job'::regclass, '{schema}.job_failure'::regclass)
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT %s ON {schema}.%I TO %s', held.privilege,
            CASE held.relname WHEN 'job' THEN 'replay' ELSE 'replay_failure' END, held.role);
        IF held.relname = 'job' AND held.privilege = 'SELECT' THEN
            EXECUTE format('GRANT SELECT ON {schema}.job_row, {schema}.failure, {schema}.parked_failure TO %s',
                held.role);
        ELSIF held.relname = 'job' AND held.privilege = 'INSERT' THEN
            EXECUTE format('GRANT INSERT, DELETE ON {schema}.job_row TO %s', held.role);
            EXECUTE format('GRANT INSERT, UPDATE (retried) ON {schema}.failure TO %s', held.role);
        END IF;
    END LOOP;
    FOR held IN
        SELECT CASE attname WHEN 'done' THEN 'replayed' ELSE attname END AS name, attname = 'state' AS is_progress,
            grantee::regrole AS role
        FROM pg_attribute, aclexplode(attacl)
        WHERE attrelid = '{schema}.job'::regclass AND NOT attisdropped AND privilege_type = 'UPDATE'
    LOOP
        EXECUTE format('GRANT UPDATE (%I) ON {schema}.replay TO %s', held.name, held.role);
        IF held.is_progress THEN
            EXECUTE format('GRANT UPDATE (released, stage, paused_because) ON {schema}.job TO %s', held.role);
        END IF;
    END LOOP;
END $do$;
"""

SENT_DAY_NEEDED = """
CREATE OR REPLACE FUNCTION {schema}.sent_day_needed(day date, rows bigint, archived boolean) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' AS $$
    SELECT coalesce(
        (SELECT {words}
        FROM {schema}.{table}
        WHERE {is_open} AND coalesce((filter ->> 'since')::timestamptz, '-infinity') < sent_day_needed.day + 1
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
"""
BY_JOBS = {
    "table": "job",
    "is_open": "kind = 'replay' AND state IN ('open', 'paused')",
    "words": "'replay ' || string_agg(id::text, ', ' ORDER BY id)"
    " || ' needs it: `relay jobs resume` or `relay jobs cancel` ends that'",
}
BY_REPLAYS = {
    "table": "replay",
    "is_open": "state = 'open'",
    "words": "'replay ' || string_agg(id::text, ', ' ORDER BY id)\n"
    "            || ' needs it: `relay replay --resume` or `relay replay cancel` ends that'",
}

DOWN = """
DROP VIEW {schema}.replay_failure;
DROP VIEW {schema}.replay;
DROP TABLE {schema}.job_row;
DELETE FROM {schema}.job WHERE kind <> 'replay';
UPDATE {schema}.job SET state = 'open' WHERE state = 'paused';
ALTER TABLE {schema}.job DROP CONSTRAINT job_state, DROP CONSTRAINT job_kind, DROP CONSTRAINT job_source,
    DROP CONSTRAINT job_stages;
ALTER TABLE {schema}.job DROP COLUMN kind, DROP COLUMN source, DROP COLUMN why, DROP COLUMN released, DROP COLUMN rate,
    DROP COLUMN stages, DROP COLUMN stage, DROP COLUMN stop_when_failing, DROP COLUMN paused_because;
ALTER TABLE {schema}.job RENAME COLUMN done TO replayed;
ALTER TABLE {schema}.job RENAME TO replay;
ALTER TABLE {schema}.replay
    ADD CONSTRAINT replay_state CHECK (state IN ('open', 'done', 'cancelled'));
ALTER TABLE {schema}.job_failure RENAME COLUMN job_id TO replay_id;
ALTER TABLE {schema}.job_failure RENAME TO replay_failure;

UPDATE {schema}.operator_audit SET command = 'replay cancel' WHERE command = 'jobs cancel';
DELETE FROM {schema}.operator_audit WHERE command IN ('jobs pause', 'jobs resume', 'parked archive', 'parked restore');
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command, DROP COLUMN job,
    ADD CONSTRAINT operator_audit_command CHECK (command IN (
        'parked retry', 'parked discard', 'quarantine reroute', 'quarantine discard', 'replay cancel', 'retention'
    ));
ALTER TABLE {schema}.dead_letter_audit DROP COLUMN job;

DROP TRIGGER note_parked ON {schema}.message_parked;
DROP FUNCTION {schema}.note_parked();
DROP TABLE {schema}.parked_failure;
DROP TABLE {schema}.failure;
DROP FUNCTION {schema}.failure_group(text, text, text, text);
DROP FUNCTION {schema}.failure_cause(text);

CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
UPDATE {schema}.message SET state = 'parked' WHERE state = 'archived';
DROP TABLE {schema}.message_archived;
"""


def upgrade(schema: str) -> None:
    needed = SENT_DAY_NEEDED.format(schema=schema, **BY_JOBS)
    fill = (SEEN, CAUSES_OF_SEEN, SINCE, CAUSES_OF_SEEN, "DROP TABLE {schema}.parked_seen")
    for script in (AS_OWNER, CAUSE, FAILURES, *fill, ARCHIVED, JOBS, GRANTS):
        op.execute(script.format(schema=schema))
    for script in (needed, "RESET ROLE"):
        op.execute(script)


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
    op.execute(SENT_DAY_NEEDED.format(schema=schema, **BY_REPLAYS))
