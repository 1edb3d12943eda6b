"""Let an operator give up a batch of Spark that was begun in pieces, and let retention forget old batches.

A batch ends once: it is committed, or given up. `give_up_batch` locks the row by which the batch was begun. Each row of
the ledger that is entered later locks it, too (`guard_batch`): it waits for a give-up, and a give-up waits for it.
The trigger holds for jobs of an earlier release as well. It also enters no piece of a batch that is committed, so that
the pieces of such a batch may be forgotten.

`forget_batches` deletes names that no rerun asks for any more. The newest committed version of each name stays, as a
stream that comes without its checkpoint is known by it. A role that may drop days may call it, before the roles are
made again.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on batch until its indexes are built, 2 s for a million rows. Jobs of Spark wait for it when they
begin or commit. ACCESS EXCLUSIVE on operator_audit while its rows are checked, an instant for a million.
"""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# In the row by which a batch was begun (partition -2).
STATE = """
ALTER TABLE {schema}.batch ADD COLUMN given_up_at timestamptz, ADD COLUMN given_up_by text,
    ADD COLUMN given_up_why text;
CREATE INDEX batch_committed ON {schema}.batch (committed_at) WHERE partition = -1;
CREATE INDEX batch_begun ON {schema}.batch (committed_at) WHERE partition = -2 AND given_up_at IS NULL;
CREATE INDEX batch_given_up ON {schema}.batch (given_up_at) WHERE given_up_at IS NOT NULL;
"""

# By its index also while the statistics say that the ledger is empty: a session keeps the plan.
GUARD = """
CREATE FUNCTION {schema}.guard_batch() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    begun record;
BEGIN
    SELECT given_up_at, given_up_by, given_up_why INTO begun FROM {schema}.batch
    WHERE app_id = NEW.app_id AND version = NEW.version AND partition = -2 FOR SHARE;
    IF begun.given_up_at IS NOT NULL THEN
        RAISE EXCEPTION 'batch ''%'' version % was given up by % (%): write what is missing under another name',
            NEW.app_id, NEW.version, begun.given_up_by, begun.given_up_why
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF NEW.partition >= 0 AND EXISTS (
        SELECT FROM {schema}.batch WHERE app_id = NEW.app_id AND version = NEW.version AND partition = -1
    ) THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard_batch BEFORE INSERT ON {schema}.batch FOR EACH ROW WHEN (NEW.partition >= -2)
    EXECUTE FUNCTION {schema}.guard_batch();
REVOKE EXECUTE ON FUNCTION {schema}.guard_batch() FROM PUBLIC;
"""

# Each statement of it has a new snapshot: the second sees what was committed while the first waited for the lock.
GIVE_UP = """
CREATE FUNCTION {schema}.give_up_batch(app text, number bigint, given_by text, reason text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
    given timestamptz;
    is_begun boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'give_up_batch needs a transaction that is READ COMMITTED';
    END IF;
    SELECT given_up_at INTO given FROM {schema}.batch
    WHERE app_id = app AND version = number AND partition = -2 FOR UPDATE;
    is_begun := FOUND;
    IF EXISTS (SELECT FROM {schema}.batch WHERE app_id = app AND version = number AND partition = -1) THEN
        RETURN 'committed';
    ELSIF NOT is_begun THEN
        RETURN 'unknown';
    ELSIF given IS NOT NULL THEN
        RETURN 'given up';
    END IF;
    UPDATE {schema}.batch SET given_up_at = clock_timestamp(), given_up_by = given_by, given_up_why = reason
    WHERE app_id = app AND version = number AND partition = -2;
    RETURN 'done';
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.give_up_batch(text, bigint, text, text) FROM PUBLIC;
"""

BEFORE = (
    "parked retry", "parked discard", "parked archive", "parked restore", "quarantine reroute", "quarantine discard",
    "replay cancel", "jobs pause", "jobs resume", "jobs cancel", "retention", "message reveal",
    "held retry",
    "quarantine pause", "quarantine resume", "lanes pause", "lanes resume",
)  # fmt: skip
AFTER = (*BEFORE, "batches give-up")
CHECK = """
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command,
    ADD CONSTRAINT operator_audit_command CHECK (command IN ({commands}));
"""
GIVEN_UP = "DELETE FROM {schema}.operator_audit WHERE command = 'batches give-up'"

# A save() without a name has one that nothing asks for again. A query of foreach_batch() keeps its name (-3).
OLD = """
    SELECT ended.app_id, ended.version
    FROM (
        SELECT app_id, version FROM {schema}.batch
        WHERE partition = -1 AND committed_at < now() - make_interval(days => greatest(keep, 1))
        UNION ALL
        SELECT app_id, version FROM {schema}.batch WHERE given_up_at < now() - make_interval(days => greatest(keep, 1))
    ) AS ended
    WHERE ended.app_id ~ '^save-[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$'
        OR EXISTS (
            SELECT FROM {schema}.batch AS later
            WHERE later.app_id = ended.app_id AND later.version > ended.version AND later.partition = -1
        )
"""

# A thousand names at a time: one may have thousands of pieces. Last, the pieces of names that stay: nothing reads them.
FORGET = """
CREATE FUNCTION {schema}.forget_batches(keep integer, dry_run boolean) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    forgotten bigint;
BEGIN
    IF dry_run THEN
        SELECT count(*) INTO forgotten FROM ({old}) AS old;
        RETURN forgotten;
    END IF;
    WITH old AS ({old} LIMIT 1000),
    gone AS (
        DELETE FROM {schema}.batch USING old
        WHERE batch.app_id = old.app_id AND batch.version = old.version AND batch.partition <> -3
    )
    SELECT count(*) INTO forgotten FROM old;
    IF forgotten = 0 THEN
        DELETE FROM {schema}.batch AS piece USING {schema}.batch AS whole
        WHERE piece.app_id = whole.app_id AND piece.version = whole.version AND piece.partition NOT IN (-1, -3)
            AND whole.partition = -1 AND whole.committed_at < now() - make_interval(days => greatest(keep, 1));
    END IF;
    RETURN forgotten;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.forget_batches(integer, boolean) FROM PUBLIC;

DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role FROM pg_proc, aclexplode(proacl)
        WHERE pg_proc.oid = '{schema}.drop_sent_day(date, boolean, boolean)'::regprocedure
            AND grantee NOT IN (0, proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.forget_batches(integer, boolean) TO %s', held.role);
    END LOOP;
END $do$;
"""

DOWN = """
DROP FUNCTION {schema}.forget_batches(integer, boolean);
DROP FUNCTION {schema}.give_up_batch(text, bigint, text, text);
DROP TRIGGER guard_batch ON {schema}.batch;
DROP FUNCTION {schema}.guard_batch();
DROP INDEX {schema}.batch_committed;
ALTER TABLE {schema}.batch DROP COLUMN given_up_at, DROP COLUMN given_up_by, DROP COLUMN given_up_why;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, STATE, GUARD, GIVE_UP, FORGET.replace("{old}", OLD), CHECK, "RESET ROLE"):
        op.execute(script.format(schema=schema, commands=_listed(AFTER)))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, GIVEN_UP, CHECK, "RESET ROLE"):
        op.execute(script.format(schema=schema, commands=_listed(BEFORE)))


def _listed(commands: tuple[str, ...]) -> str:
    return ", ".join(f"'{command}'" for command in commands)
