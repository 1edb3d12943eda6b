"""Let a job restore discarded rows, and find them by an index.

A release before this one may run on the tables, and cannot list such a job: order one when the last of them is gone.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on job for an instant, while its rows are checked. SHARE on message_discarded until the index is
built: operators discard no row meanwhile, nor do relays whose routes say `unroutable = "discard"`. For a million
discarded rows that takes a second or two.
"""

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""
CHECK = """
ALTER TABLE {schema}.job DROP CONSTRAINT job_source, ADD CONSTRAINT job_source CHECK (source IN ({sources}))
"""
BEFORE = "'sent', 'parked', 'archived', 'dead letter', 'quarantined'"
INDEX = "CREATE INDEX message_discarded_id ON {schema}.message_discarded (id)"


def upgrade(schema: str) -> None:
    op.execute(AS_OWNER.format(schema=schema))
    op.execute(CHECK.format(schema=schema, sources=f"{BEFORE}, 'discarded'"))
    op.execute(INDEX.format(schema=schema))
    op.execute("RESET ROLE")


def downgrade(schema: str) -> None:
    op.execute(f"DROP INDEX {schema}.message_discarded_id")
    op.execute(f"DELETE FROM {schema}.job WHERE source = 'discarded'")
    op.execute(CHECK.format(schema=schema, sources=BEFORE))
