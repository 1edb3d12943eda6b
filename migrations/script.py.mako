"""${message}

Lock: name the lock it takes and for how long on a million rows.
Oldest release that runs on it: name it.
"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(schema: str) -> None:
    ${downgrades if downgrades else "pass"}
