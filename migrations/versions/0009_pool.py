"""Let consumers share the partitions of a queue: members, who holds which partition, and who is the master.

Lock: ACCESS EXCLUSIVE on held_message while it gets an index, which is as long as much is held; the rest is new.
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("pool", "pool_member", "pool_partition", "pool_master")

UP = """
CREATE TABLE {schema}.pool (
    name text PRIMARY KEY, -- the consumer_name of its members
    queue text NOT NULL, -- the partitions' queues are named after it
    check_in_timeout double precision NOT NULL -- seconds without a check-in, after which a member is gone
);

CREATE TABLE {schema}.pool_member (
    pool text NOT NULL REFERENCES {schema}.pool,
    name text NOT NULL,
    incarnation uuid NOT NULL DEFAULT gen_random_uuid(), -- one that was removed and wakes up is not its namesake
    joined_at timestamptz NOT NULL DEFAULT now(),
    checked_in_at timestamptz NOT NULL DEFAULT now(),
    leaving boolean NOT NULL DEFAULT false, -- it is to get no more partitions
    unacknowledged integer NOT NULL DEFAULT 0, -- messages that it has in hand
    PRIMARY KEY (pool, name)
);

CREATE TABLE {schema}.pool_partition (
    pool text NOT NULL REFERENCES {schema}.pool,
    partition smallint NOT NULL,
    epoch bigint NOT NULL DEFAULT 0, -- one more for each holder
    member text, -- its holder
    wanted_by text, -- who gets it once its holder has released it
    taken_from text, -- a former holder that was gone: what it had in hand comes first
    since timestamptz NOT NULL DEFAULT now(), -- of the epoch
    PRIMARY KEY (pool, partition)
);

CREATE TABLE {schema}.pool_master (
    is_the_only_row boolean PRIMARY KEY DEFAULT true CHECK (is_the_only_row),
    name text NOT NULL,
    backend_pid integer NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now()
);

-- Whose holder tries the message; -1: it came to no pool.
ALTER TABLE {schema}.held_message ADD COLUMN partition smallint NOT NULL DEFAULT -1;
CREATE INDEX held_message_partition_due_at ON {schema}.held_message (consumer_name, partition, due_at);
DROP INDEX {schema}.held_message_due_at;
"""

DOWN = """
CREATE INDEX held_message_due_at ON {schema}.held_message (consumer_name, due_at);
ALTER TABLE {schema}.held_message DROP COLUMN partition;
DROP TABLE {schema}.pool_master;
DROP TABLE {schema}.pool_partition;
DROP TABLE {schema}.pool_member;
DROP TABLE {schema}.pool;
"""


def upgrade(schema: str) -> None:
    op.execute(UP.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
