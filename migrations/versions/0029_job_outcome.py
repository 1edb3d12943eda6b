"""Let a job keep what became of its rows, how fast it goes, and how much of a queue of dead letters it has read.

An older release runs on the tables, and leaves the columns as they are.

Made as the owner of the tables, whichever role migrates. Roles that may write how far a job is may write these, too.

Lock: ACCESS EXCLUSIVE on job for an instant, while its rows are checked.
"""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
ALTER TABLE {schema}.job
    ADD COLUMN watched bigint, -- rows of which it looks what becomes of them; null: none
    ADD COLUMN waiting bigint, -- of these, rows that had not gone out when it looked last; null: before that
    ADD COLUMN scanned bigint, -- letters of the queue that the last run has read
    ADD COLUMN to_scan bigint, -- letters that were in the queue when it began
    ADD COLUMN began_at timestamptz, -- when a process began with it the last time
    ADD COLUMN began_with bigint, -- rows that were tried before
    ADD CONSTRAINT job_began_at CHECK (isfinite(began_at)); -- no other moment is subtracted
"""

GRANTS = """
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role FROM pg_attribute, aclexplode(attacl)
        WHERE attrelid = '{schema}.job'::regclass AND attname = 'state' AND privilege_type = 'UPDATE' AND grantee <> 0
    LOOP
        EXECUTE format(
            'GRANT UPDATE (watched, waiting, scanned, to_scan, began_at, began_with) ON {schema}.job TO %s', held.role);
    END LOOP;
END $do$;
"""

DOWN = """
ALTER TABLE {schema}.job DROP COLUMN watched, DROP COLUMN waiting, DROP COLUMN scanned, DROP COLUMN to_scan,
    DROP COLUMN began_at, DROP COLUMN began_with
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, GRANTS, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
