"""Keep what the HTTP API has answered to each request that changes something, so that a repeat gets the same answer.

Made as the owner of the tables, whichever role migrates.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0017"
down_revision = "0015"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("api_answer",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
CREATE TABLE {schema}.api_answer (
    done_by text NOT NULL, -- the user or the token that has sent the request
    key text NOT NULL, -- its header Idempotency-Key
    request bytea NOT NULL, -- SHA-256 of method, path and body
    begun_at timestamptz NOT NULL DEFAULT now(),
    status smallint, -- null: it is being worked on, or a console has died over it
    body bytea,
    PRIMARY KEY (done_by, key)
);
CREATE INDEX api_answer_begun_at ON {schema}.api_answer (begun_at);
"""

DOWN = "DROP TABLE {schema}.api_answer"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
