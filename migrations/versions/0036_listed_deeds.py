"""Find what the list of the audit shows without the rows of jobs, of which there may be millions.

Made as the owner of the tables, whichever role migrates. An older release runs on the tables.

Lock: SHARE on operator_audit and dead_letter_audit until the indexes are built, a second for three million rows. An
operator's change waits for it; relays, writers and consumers do not.
"""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The conditions of `SOURCES` in relay/operate/audit.py.
UP = """
CREATE INDEX operator_audit_listed ON {schema}.operator_audit (id)
    WHERE job IS NULL OR starts_with(command, 'jobs ') OR command = 'replay cancel';
CREATE INDEX dead_letter_audit_listed ON {schema}.dead_letter_audit (id) WHERE job IS NULL;
"""

DOWN = """
DROP INDEX {schema}.operator_audit_listed, {schema}.dead_letter_audit_listed;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
