"""Find by an index whether a role has a row of a key that is parked or in quarantine.

With `key_scope = "role"`, a role may have a million rows of a key there, and another role's row of that key asks for
its own. Of each role, a key has one parked row that waits for no other. Apart from 0021, so that no writer waits for an
index. A relay runs without the indexes.

Made as the owner of the tables, whichever role migrates.

Lock: SHARE on message_parked and on message_quarantined until both indexes are built. For a million rows in each, that
takes 4 s. Relays and operators park and quarantine nothing meanwhile; writers go on.
"""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

UP = """
CREATE INDEX message_parked_head ON {schema}.message_parked (aggregate_type, aggregate_id) WHERE held_behind IS NULL;
CREATE INDEX message_quarantined_role ON {schema}.message_quarantined (aggregate_type, aggregate_id, written_as, id);
"""

DOWN = "DROP INDEX {schema}.message_parked_head, {schema}.message_quarantined_role"


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
