"""Let consumers note which queue they consume and which event types they handle, for `relay reconcile`.

A release before this one runs on the tables, and notes nothing: its consumers are compared with all that was sent.

Made as the owner of the tables, whichever role migrates.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("consumer_queue",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
CREATE TABLE {schema}.consumer_queue (
    consumer_name text NOT NULL,
    queue text NOT NULL,
    event_types text[], -- NULL: every type
    started_at timestamptz NOT NULL DEFAULT now(), -- of the process that started last
    PRIMARY KEY (consumer_name, queue)
);
"""

DOWN = "DROP TABLE {schema}.consumer_queue"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
