"""Serve a console: it runs jobs, the audit notes who reads messages, and answers to requests are kept for a repeat.

Operators let consumers try held messages now. Roles that may read when that is due may change it.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on job, and on operator_audit while its rows are checked, an instant for a million. No relay
waits for them.
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("api_answer",)

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

BEFORE = (
    "parked retry", "parked discard", "parked archive", "parked restore", "quarantine reroute", "quarantine discard",
    "replay cancel", "jobs pause", "jobs resume", "jobs cancel", "retention",
)  # fmt: skip
CHECK = """
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command,
    ADD CONSTRAINT operator_audit_command CHECK (command IN ({commands}));
"""
ADDED = ("message reveal", "held retry")
FORGET = "DELETE FROM {schema}.operator_audit WHERE command IN ({commands})"

ANSWERS = """
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
DROP = "DROP TABLE {schema}.api_answer"

BY_CONSOLE = "ALTER TABLE {schema}.job ADD COLUMN by_console boolean NOT NULL DEFAULT false"
BY_COMMANDS = "ALTER TABLE {schema}.job DROP COLUMN by_console"

# The role of relays and operators reads some columns; that of consumers has the whole table.
TURN = """
DO $do$
DECLARE
    held text;
BEGIN
    FOR held IN
        SELECT DISTINCT grantee::regrole FROM pg_attribute, aclexplode(attacl)
        WHERE attrelid = '{{schema}}.held_message'::regclass AND attname = 'due_at' AND privilege_type = '{had}'
            AND grantee <> 0
    LOOP
        EXECUTE format('{turn} %s', held);
    END LOOP;
END $do$;
"""
DUE = TURN.format(had="SELECT", turn="GRANT UPDATE (due_at) ON {schema}.held_message TO")
NOT_DUE = TURN.format(had="UPDATE", turn="REVOKE UPDATE (due_at) ON {schema}.held_message FROM")


def upgrade(schema: str) -> None:
    op.execute(AS_OWNER.format(schema=schema))
    _accept(schema, (*BEFORE, *ADDED))
    for script in (ANSWERS, BY_CONSOLE, DUE):
        op.execute(script.format(schema=schema))
    op.execute("RESET ROLE")


def downgrade(schema: str) -> None:
    for script in (DROP, BY_COMMANDS, NOT_DUE):
        op.execute(script.format(schema=schema))
    op.execute(FORGET.format(schema=schema, commands=_listed(ADDED)))
    _accept(schema, BEFORE)


def _accept(schema: str, commands: tuple[str, ...]) -> None:
    op.execute(CHECK.format(schema=schema, commands=_listed(commands)))


def _listed(commands: tuple[str, ...]) -> str:
    return ", ".join(f"'{each}'" for each in commands)
