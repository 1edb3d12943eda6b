"""Add the replay jobs and the rows that could not be replayed.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("replay", "replay_failure")

REPLAY = """
CREATE TABLE {schema}.replay (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    made_at timestamptz NOT NULL DEFAULT now(), -- what was sent before is selected
    made_by text NOT NULL,
    made_as text NOT NULL DEFAULT session_user,
    filter jsonb NOT NULL,
    to_exchange text,
    routing_key text,
    state text NOT NULL DEFAULT 'open',
    selected bigint, -- null until they are counted
    replayed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    position bigint NOT NULL DEFAULT 0, -- every selected row up to this id is replayed or failed
    saved_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT replay_state CHECK (state IN ('open', 'done', 'cancelled')),
    CONSTRAINT replay_filter CHECK (jsonb_typeof(filter) = 'object')
);

CREATE TABLE {schema}.replay_failure (
    replay_id bigint NOT NULL REFERENCES {schema}.replay ON DELETE CASCADE,
    id bigint NOT NULL,
    message_id uuid NOT NULL,
    reason text NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (replay_id, id)
);
"""

DOWN = """
DROP TABLE {schema}.replay_failure;
DROP TABLE {schema}.replay;
"""


def upgrade(schema: str) -> None:
    op.execute(REPLAY.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
