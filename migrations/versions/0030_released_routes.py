"""Keep which routes have left the quarantine lately, so that an operator sees what came of a repair.

A trigger writes the row when a relay deletes the route, whatever its release. The newest 1,000 are kept.
Each role that may read `quarantine` may read `quarantine_released`, before the roles are made again.

The audit takes `topology apply`, too.

Made as the owner of the tables, whichever role migrates.

Lock: SHARE ROW EXCLUSIVE on quarantine for an instant; a relay that sets rows aside waits for it. ACCESS EXCLUSIVE on
operator_audit while its rows are checked, an instant for a million.
"""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("quarantine_released",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# No unique index: a relay must be able to delete the route whatever is here.
TABLE = """
CREATE TABLE {schema}.quarantine_released (
    id bigint NOT NULL, -- of the route
    exchange text NOT NULL,
    routing_key text NOT NULL,
    reason text NOT NULL, -- the last one, in the broker's words
    since timestamptz NOT NULL,
    probes integer NOT NULL,
    probed_at timestamptz,
    released_at timestamptz NOT NULL
);
CREATE INDEX quarantine_released_at ON {schema}.quarantine_released (released_at);

DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.quarantine'::regclass AND privilege_type = 'SELECT'
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT SELECT ON {schema}.quarantine_released TO %s', held.role);
    END LOOP;
END $do$;
"""

# Two relays may release at once: neither waits for what the other forgets.
TRIGGER = """
CREATE FUNCTION {schema}.note_released() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.quarantine_released
        (id, exchange, routing_key, reason, since, probes, probed_at, released_at)
    SELECT id, exchange, routing_key, reason, since, probes, probed_at, now() FROM gone;
    IF FOUND THEN
        DELETE FROM {schema}.quarantine_released WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.quarantine_released ORDER BY released_at DESC OFFSET 1000 FOR UPDATE SKIP LOCKED
        ));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_released AFTER DELETE ON {schema}.quarantine REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION {schema}.note_released();
REVOKE EXECUTE ON FUNCTION {schema}.note_released() FROM PUBLIC;
"""

DOWN = """
DROP TRIGGER note_released ON {schema}.quarantine;
DROP FUNCTION {schema}.note_released();
DROP TABLE {schema}.quarantine_released;
DELETE FROM {schema}.operator_audit WHERE command = 'topology apply';
"""

BEFORE = (
    "parked retry", "parked discard", "parked archive", "parked restore", "quarantine reroute", "quarantine discard",
    "replay cancel", "jobs pause", "jobs resume", "jobs cancel", "retention", "message reveal",
    "held retry",
    "quarantine pause", "quarantine resume", "lanes pause", "lanes resume", "batches give-up",
)  # fmt: skip
AFTER = (*BEFORE, "topology apply")
CHECK = """
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command,
    ADD CONSTRAINT operator_audit_command CHECK (command IN ({commands}));
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, TABLE, TRIGGER, CHECK, "RESET ROLE"):
        op.execute(script.format(schema=schema, commands=_listed(AFTER)))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, CHECK, "RESET ROLE"):
        op.execute(script.format(schema=schema, commands=_listed(BEFORE)))


def _listed(commands: tuple[str, ...]) -> str:
    return ", ".join(f"'{command}'" for command in commands)
