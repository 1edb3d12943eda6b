"""Let a saved floor say in which database it is true.

A dump, or logical replication, brings the table to another server. Ids of transactions are others there, and the
sequence may give an id again that was rolled back. A relay that went on from such floors could send rows of a key out
of order.

What was saved before has no database: relays read their lanes once from the start. An older release runs on the table.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on lane_floor for an instant.
"""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The meaning of the column: `IDENTIFY` in relay/engine/read/floors.py.
UP = """
ALTER TABLE {schema}.lane_floor ADD COLUMN saved_in text;
"""

DOWN = """
ALTER TABLE {schema}.lane_floor DROP COLUMN saved_in;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
