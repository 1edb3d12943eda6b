"""Let the audit note who has read what a message says.

Lock: ACCESS EXCLUSIVE on operator_audit while its rows are checked, an instant for a million; no relay waits for it.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

BEFORE = (
    "parked retry", "parked discard", "quarantine reroute", "quarantine discard", "replay cancel", "retention",
)  # fmt: skip
CHECK = """
ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command;
ALTER TABLE {schema}.operator_audit ADD CONSTRAINT operator_audit_command CHECK (command IN ({commands}));
"""
FORGET = "DELETE FROM {schema}.operator_audit WHERE command = 'message reveal'"


def upgrade(schema: str) -> None:
    _accept(schema, (*BEFORE, "message reveal"))


def downgrade(schema: str) -> None:
    op.execute(FORGET.format(schema=schema))
    _accept(schema, BEFORE)


def _accept(schema: str, commands: tuple[str, ...]) -> None:
    listed = ", ".join(f"'{each}'" for each in commands)
    op.execute(CHECK.format(schema=schema, commands=listed))
