"""Group parked rows by their cause, set rows aside as `archived`, and keep all bulk work in one table of jobs.

`cause` takes from the words of a failure what differs from row to row; `failure_id` names the group of equal causes.
A trigger notes the group of each row that heads a key when the row is parked, whichever release parks it.

The table `replay` becomes `job`. A view of its old name shows the replays to an older release, which may write them.
What that release calls open, and this one has paused, the older one can resume.

Made as the owner of the tables, whichever role migrates. Roles that may use `replay` get the same rights on its view,
and those that read `message` may read the groups.

Lock: ACCESS EXCLUSIVE on replay and operator_audit for an instant; SHARE ROW EXCLUSIVE on message_parked, so that
nothing is parked, while the parked rows are grouped. The causes alone took 1.9 s for 100,000 rows.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("job", "parked_failure")  # but the replays, which stay in `replay`; archived rows are parked again

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The same answers as relay/operate/failures/cause.py gives: tests/failures/test_cause.py compares them. No pattern has
# alternatives, or repeats as little as possible: PostgreSQL and Python choose differently then.
# convert_to is not immutable, as it depends on the encoding of the database, which does not change.
CAUSE = """
CREATE FUNCTION {schema}.cause(words text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT left(btrim(
        regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
            left(coalesce(words, ''), 500),
        '"[^"]*"', '?', 'g'),
        '(^|[^A-Za-z0-9''])''[^'']*''', '\\1?', 'g'),
        '[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}', '#', 'g'),
        '[0-9a-fA-F]{{16,}}', '#', 'g'),
        '[0-9]+(?![0-9])(?! [A-Z]+_[A-Z])', '#', 'g'),
        '#([-.,:/+TZ]*#)+', '#', 'g'),
        '[ \\t\\r\\n]+', ' ', 'g'),
    ' '), 200)
$$;

CREATE FUNCTION {schema}.failure_id(kind text, cause text, event_type text, place text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT left(encode(sha256(convert_to(
        kind || chr(31) || cause || chr(31) || coalesce(event_type, '') || chr(31) || coalesce(place, ''),
        'UTF8')), 'hex'), 12)
$$;
"""

# A row without held_behind: what waits behind another row has no cause but that one. `retried`: by an operator.
PARKED_FAILURE = """
CREATE TABLE {schema}.parked_failure (
    id bigint PRIMARY KEY, -- of the row in message
    failure text NOT NULL, -- its group
    parked_at timestamptz NOT NULL,
    retried integer NOT NULL -- how often before it was parked this time
);
CREATE INDEX parked_failure_failure ON {schema}.parked_failure (failure, id);
CREATE INDEX message_parked_held_behind ON {schema}.message_parked (held_behind) WHERE held_behind IS NOT NULL;

CREATE FUNCTION {schema}.note_failure() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM {schema}.parked_failure WHERE id = OLD.id;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.held_behind IS NULL THEN
        INSERT INTO {schema}.parked_failure (id, failure, parked_at, retried)
        SELECT NEW.id,
            {schema}.failure_id('parked', {schema}.cause(NEW.last_error), NEW.event_type, NEW.exchange),
            coalesce(NEW.parked_at, NEW.created_at),
            (SELECT count(*) FROM {schema}.operator_audit WHERE target = NEW.id::text AND command = 'parked retry')
        ON CONFLICT (id) DO UPDATE
            SET failure = excluded.failure, parked_at = excluded.parked_at, retried = excluded.retried;
    END IF;
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.note_failure() FROM PUBLIC;
CREATE TRIGGER note_failure AFTER INSERT OR DELETE OR UPDATE OF held_behind, last_error, parked_at, event_type, exchange
    ON {schema}.message_parked FOR EACH ROW EXECUTE FUNCTION {schema}.note_failure();

INSERT INTO {schema}.parked_failure (id, failure, parked_at, retried)
SELECT id, {schema}.failure_id('parked', {schema}.cause(last_error), event_type, exchange),
    coalesce(parked_at, created_at),
    (SELECT count(*) FROM {schema}.operator_audit WHERE target = row.id::text AND command = 'parked retry')
FROM {schema}.message_parked AS row WHERE held_behind IS NULL;
ANALYZE {schema}.parked_failure;
"""

# ATTACH takes SHARE UPDATE EXCLUSIVE on message; PARTITION OF would take ACCESS EXCLUSIVE.
ARCHIVED = """
CREATE TABLE {schema}.message_archived (LIKE {schema}.message INCLUDING ALL);
ALTER TABLE {schema}.message ATTACH PARTITION {schema}.message_archived FOR VALUES IN ('archived');
CREATE UNIQUE INDEX message_archived_id ON {schema}.message_archived (id);

CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded
    UNION ALL SELECT 'archived', count(*) FROM {schema}.message_archived;
"""

# The view has the columns of before, so what an older release inserts gets the defaults of `job`: kind 'replay'.
JOB = """
ALTER TABLE {schema}.replay RENAME TO job;
ALTER TABLE {schema}.job RENAME COLUMN replayed TO done;
ALTER TABLE {schema}.job RENAME CONSTRAINT replay_state TO job_state;
ALTER TABLE {schema}.job RENAME CONSTRAINT replay_filter TO job_filter;
ALTER TABLE {schema}.job
    ADD COLUMN kind text NOT NULL DEFAULT 'replay',
    ADD COLUMN why text,
    ADD COLUMN released bigint NOT NULL DEFAULT 0, -- rows let go behind those that are done
    ADD COLUMN rate real, -- rows a second at most
    ADD COLUMN stages integer[] NOT NULL DEFAULT '{{}}', -- rows of each stage but the last, which has the rest
    ADD COLUMN stop_when_failing real, -- a share: 0.05
    ADD COLUMN stage integer NOT NULL DEFAULT 0, -- how many stages have been judged
    ADD COLUMN paused_at timestamptz,
    ADD COLUMN paused_by text,
    ADD COLUMN paused_why text,
    ADD CONSTRAINT job_kind CHECK (kind IN ('retry', 'discard', 'archive', 'restore', 'replay'));

CREATE VIEW {schema}.replay AS
    SELECT id, made_at, made_by, made_as, filter, to_exchange, routing_key, state, selected, done AS replayed, failed,
        position, saved_at
    FROM {schema}.job WHERE kind = 'replay';
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role, privilege_type AS privilege, column_name FROM (
            SELECT (aclexplode(relacl)).*, NULL::name AS column_name FROM pg_class WHERE oid = '{schema}.job'::regclass
            UNION ALL
            SELECT (aclexplode(attacl)).*, CASE attname WHEN 'done' THEN 'replayed' ELSE attname END
            FROM pg_attribute WHERE attrelid = '{schema}.job'::regclass
        ) AS acl
        WHERE grantee NOT IN (0, (SELECT relowner FROM pg_class WHERE oid = '{schema}.job'::regclass))
            AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE')
    LOOP
        EXECUTE format('GRANT %s%s ON {schema}.replay TO %s', held.privilege,
            CASE WHEN held.column_name IS NULL THEN '' ELSE format(' (%I)', held.column_name) END, held.role);
    END LOOP;
END $do$;

ALTER TABLE {schema}.operator_audit ADD COLUMN job bigint; -- that did it
CREATE INDEX operator_audit_job ON {schema}.operator_audit (job, id) WHERE job IS NOT NULL;
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command;
ALTER TABLE {schema}.operator_audit ADD CONSTRAINT operator_audit_command CHECK (command IN (
    'parked retry', 'parked discard', 'parked archive', 'parked restore', 'quarantine reroute', 'quarantine discard',
    'replay cancel', 'job pause', 'job resume', 'job cancel', 'retention'
)) NOT VALID;
"""

# In place: the owner and the rights of the function stay.
REWORD = """
DO $do$
BEGIN
    EXECUTE replace(pg_get_functiondef('{schema}.sent_day_needed(date, bigint, boolean)'::regprocedure), $a${before}$a$,
        $a${after}$a$);
END $do$;
"""
OLD_WORDS = "`relay replay --resume` or `relay replay cancel` ends that"
NEW_WORDS = "`relay jobs resume` or `relay jobs cancel` ends that"

DOWN = """
DELETE FROM {schema}.operator_audit
WHERE command IN ('parked archive', 'parked restore', 'job pause', 'job resume', 'job cancel');
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command;
ALTER TABLE {schema}.operator_audit ADD CONSTRAINT operator_audit_command CHECK (command IN (
    'parked retry', 'parked discard', 'quarantine reroute', 'quarantine discard', 'replay cancel', 'retention'
));
ALTER TABLE {schema}.operator_audit DROP COLUMN job;
DROP VIEW {schema}.replay;
DELETE FROM {schema}.job WHERE kind <> 'replay';
ALTER TABLE {schema}.job DROP COLUMN kind, DROP COLUMN why, DROP COLUMN released, DROP COLUMN rate,
    DROP COLUMN stages, DROP COLUMN stop_when_failing, DROP COLUMN stage, DROP COLUMN paused_at, DROP COLUMN paused_by,
    DROP COLUMN paused_why;
ALTER TABLE {schema}.job RENAME CONSTRAINT job_state TO replay_state;
ALTER TABLE {schema}.job RENAME CONSTRAINT job_filter TO replay_filter;
ALTER TABLE {schema}.job RENAME COLUMN done TO replayed;
ALTER TABLE {schema}.job RENAME TO replay;

DROP TRIGGER note_failure ON {schema}.message_parked;
DROP FUNCTION {schema}.note_failure();
DROP INDEX {schema}.message_parked_held_behind;
DROP TABLE {schema}.parked_failure;
DROP FUNCTION {schema}.failure_id(text, text, text, text);
DROP FUNCTION {schema}.cause(text);

UPDATE {schema}.message SET state = 'parked' WHERE state = 'archived';
CREATE OR REPLACE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
DROP TABLE {schema}.message_archived;
"""


def upgrade(schema: str) -> None:
    op.execute(AS_OWNER.format(schema=schema))
    for script in (CAUSE, JOB, PARKED_FAILURE, ARCHIVED):
        op.execute(script.format(schema=schema))
    op.execute(REWORD.format(schema=schema, before=OLD_WORDS, after=NEW_WORDS))
    op.execute("RESET ROLE")


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
    op.execute(REWORD.format(schema=schema, before=NEW_WORDS, after=OLD_WORDS))
