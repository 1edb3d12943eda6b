"""Let writers switch the doorbell off for a transaction, and test it at less cost.

Lock: SHARE ROW EXCLUSIVE on message for an instant; it waits for open transactions that have written.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

# PREPARE TRANSACTION is refused after a NOTIFY. A writer that prepares says SET LOCAL outbox.ring = off, and the
# relay finds its rows by polling.
RING = """
CREATE OR REPLACE FUNCTION {schema}.ring() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('outbox.ring', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_catalog.pg_notify('{schema}.doorbell', '');
    END IF;
    RETURN NULL;
END $$;
"""

# The test stands in WHEN: calling a function in PL/pgSQL costs a writer more than the test itself. The key is written
# out, since an expression in WHEN is parsed and simplified again for each statement.
# Taken and given back in one expression: between two statements a cancel could leave the lock with the session.
TRIGGER = """
DO $do$ BEGIN
    EXECUTE format($$
        CREATE OR REPLACE TRIGGER ring AFTER INSERT ON {schema}.message FOR EACH STATEMENT
        WHEN (NOT (pg_catalog.pg_try_advisory_lock(%1$s) AND pg_catalog.pg_advisory_unlock(%1$s)))
        EXECUTE FUNCTION {schema}.ring()
    $$, quote_literal(hashtextextended('{schema}.doorbell', 0)) || '::bigint');
END $do$;
"""

DOWN = """
CREATE OR REPLACE FUNCTION {schema}.ring() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    doorbell CONSTANT bigint := pg_catalog.hashtextextended('{schema}.doorbell', 0);
BEGIN
    IF NOT (pg_catalog.pg_try_advisory_lock(doorbell) AND pg_catalog.pg_advisory_unlock(doorbell)) THEN
        PERFORM pg_catalog.pg_notify('{schema}.doorbell', '');
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER ring AFTER INSERT ON {schema}.message FOR EACH STATEMENT EXECUTE FUNCTION {schema}.ring();
"""


def upgrade(schema: str) -> None:
    op.execute(RING.format(schema=schema))
    op.execute(TRIGGER.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
