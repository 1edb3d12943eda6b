"""${message}

Lock: name the lock it takes and for how long on a million rows.
"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None
oldest_release = "name the oldest release that runs on the tables after it"
drops = ()  # tables that `downgrade` drops with all their rows


def upgrade(schema: str) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(schema: str) -> None:
    ${downgrades if downgrades else "pass"}
