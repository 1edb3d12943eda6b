"""Let no publication keep a row from its mark, and no listener keep a writer from its commit.

PostgreSQL refuses to change a row that a publication of updates or deletes covers, if its table has no replica
identity. Most tables have one by their primary key. Pending rows have one by their index of lane and id. Rows of a sent
day come and go with it, and need no identity.

The queue of NOTIFY belongs to the whole server. While a session that listens reads nothing, it grows, whichever
application that is. Once it is full, a transaction that notifies fails. So no writer rings while the queue is half
full: the relay finds the rows by polling.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on message_quarantined and message_discarded until their indexes are built, a second or two for
a million rows in each. ACCESS EXCLUSIVE on message_pending, message_parked, message_archived and quarantine_released
for an instant.
"""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UNIQUE = """
CREATE UNIQUE INDEX message_quarantined_one_row ON {schema}.message_quarantined (id);
CREATE UNIQUE INDEX message_discarded_one_row ON {schema}.message_discarded (id);
DROP INDEX {schema}.message_quarantined_row, {schema}.message_discarded_id;
ALTER INDEX {schema}.message_quarantined_one_row RENAME TO message_quarantined_row;
ALTER INDEX {schema}.message_discarded_one_row RENAME TO message_discarded_id;
"""

# `message_pending` comes last, as writers and marks wait for it. It gets no index on `id` alone. While the statistics
# say that the table is empty, reads of a lane would go by it, through all lanes (tests/engine/test_plans.py).
# `quarantine_released` has no unique index on purpose (migration 0030), and at most 1,000 short rows.
IDENTITIES = """
ALTER TABLE {schema}.message_parked REPLICA IDENTITY USING INDEX message_parked_id;
ALTER TABLE {schema}.message_quarantined REPLICA IDENTITY USING INDEX message_quarantined_row;
ALTER TABLE {schema}.message_discarded REPLICA IDENTITY USING INDEX message_discarded_id;
ALTER TABLE {schema}.message_archived REPLICA IDENTITY USING INDEX message_archived_id;
ALTER TABLE {schema}.quarantine_released REPLICA IDENTITY FULL;
ALTER TABLE {schema}.message_pending REPLICA IDENTITY USING INDEX message_pending_lane_id;
"""

RING = """
CREATE OR REPLACE FUNCTION {schema}.ring() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('outbox.ring', true) IS DISTINCT FROM 'off'{unless_full} THEN
        PERFORM pg_catalog.pg_notify('{schema}.doorbell', '');
    END IF;
    RETURN NULL;
END $$;
"""
UNLESS_FULL = "\n            AND pg_catalog.pg_notification_queue_usage() < 0.5"

DOWN = """
ALTER TABLE {schema}.message_pending REPLICA IDENTITY DEFAULT;
ALTER TABLE {schema}.message_parked REPLICA IDENTITY DEFAULT;
ALTER TABLE {schema}.message_quarantined REPLICA IDENTITY DEFAULT;
ALTER TABLE {schema}.message_discarded REPLICA IDENTITY DEFAULT;
ALTER TABLE {schema}.message_archived REPLICA IDENTITY DEFAULT;
ALTER TABLE {schema}.quarantine_released REPLICA IDENTITY DEFAULT;
DROP INDEX {schema}.message_quarantined_row, {schema}.message_discarded_id;
CREATE INDEX message_quarantined_row ON {schema}.message_quarantined (id);
CREATE INDEX message_discarded_id ON {schema}.message_discarded (id);
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UNIQUE, IDENTITIES, RING, "RESET ROLE"):
        op.execute(script.format(schema=schema, unless_full=UNLESS_FULL))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, RING, "RESET ROLE"):
        op.execute(script.format(schema=schema, unless_full=""))
