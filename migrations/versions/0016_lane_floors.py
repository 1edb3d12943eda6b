"""Save how far each lane is read, so that a take-over need not read over the dead rows that an old snapshot keeps.

A newer release needs the table; an older one leaves it alone. What was saved stays true while an older release holds
the lane. Only rows that it lets go from quarantine, and has not read when it is killed, wait for the next sweep.

Made as the owner of the tables, whichever role migrates. Roles that may write `node` are relays: they get the same
rights on `lane_floor`.

Lock: none.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("lane_floor",)  # a relay then reads a lane from the start

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The meaning of the columns: LaneFloor in relay/engine/read/positions.py.
UP = """
CREATE TABLE {schema}.lane_floor (
    lane smallint PRIMARY KEY,
    floor bigint NOT NULL,
    watermark bigint NOT NULL,
    running bigint[] NOT NULL,
    since bigint[] NOT NULL,
    saved_at timestamptz NOT NULL DEFAULT now()
);
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role, privilege_type AS privilege FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.node'::regclass AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE')
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT %s ON {schema}.lane_floor TO %s', held.privilege, held.role);
    END LOOP;
END $do$;
"""

DOWN = """
DROP TABLE {schema}.lane_floor;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
