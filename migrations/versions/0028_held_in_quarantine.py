"""Keep in `held_behind` for which row of its key a row in quarantine waits.

Until now the words of `last_error` alone had it. A relay writes the column with the words, and clears both. Rows that
are there get it from their words, once.

Made as the owner of the table, whichever role migrates.

Lock: ROW EXCLUSIVE on message_quarantined, and the rows that wait behind others. Relays put rows in quarantine
meanwhile; a relay that lets one of those rows go waits until the end. For 200,000 such rows that took 19 s on a busy
machine.
"""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = r"""
UPDATE {schema}.message_quarantined
SET held_behind = substring(last_error FROM '^waits behind message (\d{{1,18}})$')::bigint
WHERE starts_with(last_error, 'waits behind message ')
"""

# An earlier relay would let these rows go with the column set.
DOWN = "UPDATE {schema}.message_quarantined SET held_behind = NULL WHERE held_behind IS NOT NULL"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
