"""Note who has sent back or thrown away which dead letter.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("dead_letter_audit",)

UP = """
CREATE TABLE {schema}.dead_letter_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_at timestamptz NOT NULL DEFAULT now(),
    done_by text NOT NULL, -- user and host of the command, or whom it was told
    done_as text NOT NULL DEFAULT session_user,
    command text NOT NULL,
    why text NOT NULL,
    queue text NOT NULL, -- of the dead letters
    sent_to text, -- the queue that has confirmed the message; null: nothing was sent
    message_id text, -- whatever the message had: it need not be a UUID
    event_type text,
    key text,
    reason text,
    last_failed_at timestamptz,
    CONSTRAINT dead_letter_audit_command CHECK (command IN ('retry', 'discard'))
);
CREATE INDEX dead_letter_audit_message_id ON {schema}.dead_letter_audit (message_id);
"""

DOWN = "DROP TABLE {schema}.dead_letter_audit"


def upgrade(schema: str) -> None:
    op.execute(UP.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
