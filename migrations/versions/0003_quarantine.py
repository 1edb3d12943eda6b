"""Put rows whose route does not work into a separate partition, next to the list of these routes.

Lock: ACCESS EXCLUSIVE on message for an instant, to add a column; it waits for transactions that have written or read.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("quarantine",)

QUARANTINE = """
CREATE TABLE {schema}.quarantine (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    exchange text NOT NULL,
    routing_key text NOT NULL,
    reason text NOT NULL, -- in the broker's words
    since timestamptz NOT NULL DEFAULT now(),
    probes integer NOT NULL DEFAULT 0,
    probed_at timestamptz,
    UNIQUE (exchange, routing_key)
);

ALTER TABLE {schema}.message ADD COLUMN quarantine bigint;

CREATE TABLE {schema}.message_quarantined PARTITION OF {schema}.message FOR VALUES IN ('quarantined');
CREATE UNIQUE INDEX message_quarantined_id ON {schema}.message_quarantined (quarantine, id);
CREATE INDEX message_quarantined_key ON {schema}.message_quarantined (aggregate_type, aggregate_id, id);
"""

DOWN = """
UPDATE {schema}.message SET state = 'pending', quarantine = NULL, last_error = NULL WHERE state = 'quarantined';
DROP TABLE {schema}.message_quarantined;
ALTER TABLE {schema}.message DROP COLUMN quarantine;
DROP TABLE {schema}.quarantine;
"""


def upgrade(schema: str) -> None:
    op.execute(QUARANTINE.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
