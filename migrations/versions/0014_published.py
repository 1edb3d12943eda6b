"""Count what each mark has sent in the mark's own transaction, so that a killed relay loses nothing of its total.

A mark inserts a row into `published`. The node's heartbeat adds the rows above `published_to` to `published_total`.
`published_total` with the rows above `published_to` is the number of rows that were marked.

An older relay counts as before: it inserts no row, and adds its own count with its heartbeat. It leaves `published_to`
alone. So what marks of a newer relay of its name have counted is added when that one comes back.

Made as the owner of the tables, whichever role migrates. Roles that may write `node` are relays: they get the same
rights on `published`, since a relay that may not insert into it cannot mark.

Lock: ACCESS EXCLUSIVE on node for an instant.
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ("published",)  # after adding its rows to the totals

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# The node comes first in the key: a heartbeat reads only its own node's new rows, whatever the others have written.
UP = """
CREATE TABLE {schema}.published (
    position bigint GENERATED ALWAYS AS IDENTITY,
    node text NOT NULL,
    messages integer NOT NULL,
    PRIMARY KEY (node, position)
);
ALTER TABLE {schema}.node ADD COLUMN published_to bigint NOT NULL DEFAULT 0;
DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT grantee::regrole AS role, privilege_type AS privilege FROM pg_class, aclexplode(relacl)
        WHERE pg_class.oid = '{schema}.node'::regclass AND privilege_type IN ('SELECT', 'INSERT', 'DELETE')
            AND grantee NOT IN (0, relowner)
    LOOP
        EXECUTE format('GRANT %s ON {schema}.published TO %s', held.privilege, held.role);
    END LOOP;
END $do$;
"""

DOWN = """
UPDATE {schema}.node SET published_total = published_total + (
    SELECT coalesce(sum(messages), 0) FROM {schema}.published AS mark
    WHERE mark.node = node.name AND mark.position > node.published_to
);
ALTER TABLE {schema}.node DROP COLUMN published_to;
DROP TABLE {schema}.published;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
