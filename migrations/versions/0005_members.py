"""Let the relays share the lanes: each tells whether it can deliver, and whether it stands by.

Lock: ACCESS EXCLUSIVE on node for an instant.
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

UP = """
ALTER TABLE {schema}.node
    ADD COLUMN can_deliver boolean NOT NULL DEFAULT true,
    ADD COLUMN standby boolean NOT NULL DEFAULT false;
"""

DOWN = """
ALTER TABLE {schema}.node DROP COLUMN can_deliver, DROP COLUMN standby;
"""


def upgrade(schema: str) -> None:
    op.execute(UP.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
