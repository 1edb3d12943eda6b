"""Note of each row which role wrote it, as the database knows it: a row may hold up the rows of another role.

Writers are granted no INSERT on the column, so no writer can name another role. The default is `current_user`, the role
whose rights the INSERT used. `session_user` would part the rows of an application whose pods have a login each and set
one role. Only `message` has this default. Its partitions have '': a row that an earlier release marks as sent does not
tell the relay's role. Rows from before this migration have '', too.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on message, each of its partitions and message_state for an instant, to add a column. It waits
for transactions that have written or read. No row is rewritten.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# In one statement PostgreSQL would give every row there is the role that migrates.
COLUMN = """
ALTER TABLE {schema}.message ADD COLUMN written_as text NOT NULL DEFAULT '';
ALTER TABLE ONLY {schema}.message ALTER COLUMN written_as SET DEFAULT current_user;
"""

STATE = """
CREATE OR REPLACE VIEW {schema}.message_state AS SELECT * FROM {schema}.message;
"""

SENT = """
CREATE OR REPLACE FUNCTION {schema}.sent(since timestamptz, until timestamptz) RETURNS SETOF {schema}.message_state
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT * FROM {schema}.message_state WHERE state = 'sent' AND sent_at >= since AND sent_at < until;
END;
"""

# A view cannot lose a column. It is made again, with the rights that were granted on it, on its columns and on `sent`.
NOTE_RIGHTS = """
SELECT set_config('outbox.rights', string_agg(format('GRANT %s ON %s TO %s%s', privilege_type || columns, object,
    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
    CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END), '; '), true)
FROM (
    SELECT '{schema}.message_state' AS object, '' AS columns, relacl AS rights
    FROM pg_class WHERE oid = '{schema}.message_state'::regclass
    UNION ALL
    SELECT '{schema}.message_state', format(' (%I)', attname), attacl
    FROM pg_attribute
    WHERE attrelid = '{schema}.message_state'::regclass AND attnum > 0 AND attname <> 'written_as'
    UNION ALL
    SELECT 'FUNCTION {schema}.sent(timestamptz, timestamptz)', '', proacl
    FROM pg_proc WHERE oid = '{schema}.sent(timestamptz, timestamptz)'::regprocedure
) AS granted
CROSS JOIN LATERAL aclexplode(rights)
"""

GRANT_AGAIN = """
DO $do$ BEGIN EXECUTE coalesce(nullif(current_setting('outbox.rights'), ''), 'SELECT'); END $do$
"""

DOWN = """
DROP FUNCTION {schema}.sent(timestamptz, timestamptz);
DROP VIEW {schema}.message_state;
ALTER TABLE {schema}.message DROP COLUMN written_as;
CREATE VIEW {schema}.message_state AS SELECT * FROM {schema}.message;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, COLUMN, STATE, SENT, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, NOTE_RIGHTS, DOWN, SENT, GRANT_AGAIN, "RESET ROLE"):
        op.execute(script.format(schema=schema))
