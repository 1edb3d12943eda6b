"""Note which operator has changed or destroyed what, and why.

Made as the owner of the tables, whichever role migrates.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("operator_audit",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
CREATE TABLE {schema}.operator_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_at timestamptz NOT NULL DEFAULT now(),
    done_by text NOT NULL, -- user and host of the command, or whom it was told
    done_as text NOT NULL DEFAULT session_user,
    command text NOT NULL,
    target text NOT NULL, -- the id of the row or of the replay, or the day's table
    why text,
    CONSTRAINT operator_audit_command CHECK (command IN (
        'parked retry', 'parked discard', 'quarantine reroute', 'quarantine discard', 'replay cancel', 'retention'
    ))
);
CREATE INDEX operator_audit_target ON {schema}.operator_audit (target, command);
"""

DOWN = "DROP TABLE {schema}.operator_audit"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
