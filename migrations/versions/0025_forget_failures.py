"""Let retention forget causes of failures of which no row is parked any more.

`failure` kept a row for each cause, event type and exchange that was ever seen. A role that may drop days may call
the new function, before the roles are made again.

A trigger counts the age of a cause from the last retry. A cause that is about to be forgotten is locked first. The
trigger that notes a parked row takes a lock, too: it then sees that the cause is gone, and writes it again.

Made as the owner of the tables, whichever role migrates.

Lock: SHARE ROW EXCLUSIVE on failure for an instant. A relay that parks a row of a new cause waits for it.
"""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The second statement has a newer snapshot: it sees each row that was parked before the lock was taken.
FORGET = """
CREATE FUNCTION {schema}.forget_failures(keep integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    locked text[];
    forgotten bigint;
BEGIN
    locked := ARRAY(
        SELECT id FROM {schema}.failure
        WHERE seen_at < now() - make_interval(days => greatest(keep, 1))
            AND NOT EXISTS (SELECT FROM {schema}.parked_failure AS noted WHERE noted.failure = failure.id)
        LIMIT 10000
        FOR UPDATE SKIP LOCKED
    );
    DELETE FROM {schema}.failure
    WHERE id = ANY (locked)
        AND NOT EXISTS (SELECT FROM {schema}.parked_failure AS noted WHERE noted.failure = failure.id);
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.forget_failures(integer) FROM PUBLIC;

CREATE FUNCTION {schema}.note_retried() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.seen_at := now();
    RETURN NEW;
END $$;
CREATE TRIGGER note_retried BEFORE UPDATE OF retried ON {schema}.failure
    FOR EACH ROW EXECUTE FUNCTION {schema}.note_retried();

DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = '{schema}.drop_sent_day(date, boolean, boolean)'::regprocedure
            AND grantee NOT IN (0, proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.forget_failures(integer) TO %s', held.role);
    END LOOP;
END $do$;
"""

# As in migration 0015, but for how the cause is looked for.
NOTE_PARKED = """
CREATE OR REPLACE FUNCTION {schema}.note_parked() RETURNS trigger
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
    {note}
    INSERT INTO {schema}.parked_failure AS noted (id, failure, held_behind, parked_at)
        VALUES (NEW.id, named, NEW.held_behind, NEW.parked_at)
        ON CONFLICT (id) DO UPDATE SET failure = EXCLUDED.failure, held_behind = EXCLUDED.held_behind,
            parked_at = EXCLUDED.parked_at;
    RETURN NULL;
END $$;
"""
LOCKED = """PERFORM FROM {schema}.failure WHERE id = named FOR KEY SHARE;
    IF NOT FOUND THEN
        INSERT INTO {schema}.failure (id, source, cause, event_type, place)
            VALUES (named, 'parked', cause, NEW.event_type, coalesce(NEW.exchange, ''))
            ON CONFLICT DO NOTHING;
    END IF;"""
UNLOCKED = """INSERT INTO {schema}.failure (id, source, cause, event_type, place)
        SELECT named, 'parked', cause, NEW.event_type, coalesce(NEW.exchange, '')
        WHERE NOT EXISTS (SELECT FROM {schema}.failure WHERE id = named)
        ON CONFLICT DO NOTHING;"""

DOWN = """
DROP TRIGGER note_retried ON {schema}.failure;
DROP FUNCTION {schema}.note_retried();
DROP FUNCTION {schema}.forget_failures(integer);
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, FORGET, NOTE_PARKED.replace("{note}", LOCKED), "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, NOTE_PARKED.replace("{note}", UNLOCKED), DOWN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
