"""Let an operator pause a route or a lane.

A release before this one may run on the tables, and knows no pause: its relays probe a paused route, and take a paused
lane. Pause something when the last of them is gone.

Made as the owner of the tables, whichever role migrates. Roles that may change `quarantine` are relays, operators and
consoles: they may pause a lane, too.

Lock: ACCESS EXCLUSIVE on quarantine for an instant, and on operator_audit while its rows are checked, an instant for a
million. A relay that sets rows aside waits for the first.
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("lane_pause",)  # a relay then takes the lanes

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
ALTER TABLE {schema}.quarantine
    ADD COLUMN paused_at timestamptz, -- null: not paused
    ADD COLUMN paused_by text,
    ADD COLUMN paused_why text;

CREATE TABLE {schema}.lane_pause (
    lane smallint PRIMARY KEY CHECK (lane BETWEEN 0 AND 15),
    paused_at timestamptz NOT NULL DEFAULT now(),
    paused_by text NOT NULL,
    paused_why text NOT NULL
);
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role, privilege_type AS privilege FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.quarantine'::regclass AND privilege_type IN ('SELECT', 'INSERT')
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT %s ON {schema}.lane_pause TO %s',
            CASE held.privilege WHEN 'INSERT' THEN 'INSERT, DELETE' ELSE held.privilege END, held.role);
    END LOOP;
END $do$;
"""

DOWN = """
DROP TABLE {schema}.lane_pause;
ALTER TABLE {schema}.quarantine DROP COLUMN paused_at, DROP COLUMN paused_by, DROP COLUMN paused_why;
"""

BEFORE = (
    "parked retry", "parked discard", "parked archive", "parked restore", "quarantine reroute", "quarantine discard",
    "replay cancel", "jobs pause", "jobs resume", "jobs cancel", "retention", "message reveal",
    "held retry",
)  # fmt: skip
PAUSES = ("quarantine pause", "quarantine resume", "lanes pause", "lanes resume")
CHECK = """
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command,
    ADD CONSTRAINT operator_audit_command CHECK (command IN ({commands}));
"""
FORGET = "DELETE FROM {schema}.operator_audit WHERE command IN ({commands})"


def upgrade(schema: str) -> None:
    op.execute(AS_OWNER.format(schema=schema))
    op.execute(UP.format(schema=schema))
    op.execute(CHECK.format(schema=schema, commands=_listed(*BEFORE, *PAUSES)))
    op.execute("RESET ROLE")


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
    op.execute(FORGET.format(schema=schema, commands=_listed(*PAUSES)))
    op.execute(CHECK.format(schema=schema, commands=_listed(*BEFORE)))


def _listed(*commands: str) -> str:
    return ", ".join(f"'{each}'" for each in commands)
