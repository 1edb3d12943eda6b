"""Keep the figures of the console's last hour, so that its curves outlast a restart.

A row is ten seconds. Consoles write it, at most some 360 rows, and delete what is older than an hour.

Each role that may change `api_answer`, as the console's, may change `console_history`, before the roles are made again.

Made as the owner of the tables, whichever role migrates.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("console_history",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

TABLE = """
CREATE TABLE {schema}.console_history (
    at timestamptz PRIMARY KEY, -- when the ten seconds began, by the database's clock
    backlog bigint, -- each figure is the worst that a console saw; null: not known
    age_s double precision,
    rate double precision,
    in_queues bigint,
    parked bigint,
    latency_s double precision,
    sent jsonb, -- the busiest routes and event types, each with its messages a second
    CONSTRAINT console_history_figures CHECK (
        least(backlog, age_s, rate, in_queues, parked, latency_s) >= 0 AND
        greatest(backlog, age_s, rate, in_queues, parked, latency_s) < 1e19 -- and so neither infinite nor NaN
    )
);

DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.api_answer'::regclass AND privilege_type = 'UPDATE'
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.console_history TO %s', held.role);
    END LOOP;
END $do$;
"""

DOWN = "DROP TABLE {schema}.console_history"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, TABLE, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
