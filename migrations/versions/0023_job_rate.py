"""Bound the rate of a job: one of 1e-300 rows a second ended all jobs of a console.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on job for an instant, while its rows are checked.
"""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# NaN is above every number in PostgreSQL.
UP = """
LOCK TABLE {schema}.job;
UPDATE {schema}.job SET rate = least(greatest(rate, 0.01), 999999) WHERE NOT (rate >= 0.01 AND rate < 1000000);
ALTER TABLE {schema}.job ADD CONSTRAINT job_rate CHECK (rate >= 0.01 AND rate < 1000000);
"""

DOWN = "ALTER TABLE {schema}.job DROP CONSTRAINT job_rate"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
