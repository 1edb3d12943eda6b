"""Note which days of sent rows are archived, with what was verified of them.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("archived_day",)

UP = """
CREATE TABLE {schema}.archived_day (
    day date PRIMARY KEY,
    rows bigint NOT NULL,
    checksum numeric NOT NULL, -- of every row, whatever their order; spark/outbox_spark/archiving/checksum.py
    path text NOT NULL, -- of the archive that holds the day
    archived_at timestamptz NOT NULL DEFAULT now(),
    archived_as text NOT NULL DEFAULT session_user
);
"""

DOWN = "DROP TABLE {schema}.archived_day"


def upgrade(schema: str) -> None:
    op.execute(UP.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
