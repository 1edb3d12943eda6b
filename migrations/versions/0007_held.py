"""Let consumers hold the keys of failed messages, and count the tries that did not end.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("held_message", "begun_message")

UP = """
CREATE TABLE {schema}.held_message (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- the order within a key
    consumer_name text NOT NULL,
    key text NOT NULL,
    message_id uuid NOT NULL,
    event_type text NOT NULL,
    exchange text NOT NULL,
    routing_key text NOT NULL,
    envelope bytea NOT NULL, -- the properties, as AMQP writes them
    body bytea NOT NULL,
    held_at timestamptz NOT NULL DEFAULT now(),
    attempts integer NOT NULL, -- tries that failed
    begun integer NOT NULL DEFAULT 0, -- tries since one has ended
    first_failed_at timestamptz,
    last_failed_at timestamptz,
    due_at timestamptz NOT NULL, -- of the next try; infinity: not before it is the first of its key
    exception text,
    error text,
    reason text, -- it is tried no more, and waits to be taken by the dead letters
    UNIQUE (consumer_name, message_id)
);
CREATE INDEX held_message_key ON {schema}.held_message (consumer_name, key, position);
CREATE INDEX held_message_due_at ON {schema}.held_message (consumer_name, due_at);

CREATE TABLE {schema}.begun_message (
    consumer_name text NOT NULL,
    message_id uuid NOT NULL,
    begun integer NOT NULL DEFAULT 2, -- tries; the first delivery is not counted when it begins, but here
    begun_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_name, message_id)
);
"""

DOWN = """
DROP TABLE {schema}.begun_message;
DROP TABLE {schema}.held_message;
"""


def upgrade(schema: str) -> None:
    op.execute(UP.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
