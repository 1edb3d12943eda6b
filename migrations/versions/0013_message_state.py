"""Answer "what state is this message in?" in one place: two views and a function, over whatever holds the rows.

`message_count` counts by state, `message_state` shows messages, `sent` returns those of a time range. Readers ask these
three, so the tables beneath them may change.

The views run with their owner's rights (no security_invoker). A reader needs SELECT on the view, or on some of its
columns, and no right on what lies beneath. `sent` runs with the caller's: PostgreSQL inlines no function that is
SECURITY DEFINER, and only an inlined one leaves out the days of other times. It reads `message_state`.

Made as the owner of the tables, whichever role migrates.

Lock: none that anyone waits for; every object is new.
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# An arm that names its partition needs no column, so an index alone can count. A `WHERE state = 'pending'` would be
# checked in every row, and fetch each payload's page. `sent` has no index to gain from. By message, a count of
# another state takes no lock on message_sent, which retention wants for itself when it drops a day.
# A state that nobody asks for is not counted.
COUNT = """
CREATE VIEW {schema}.message_count AS
    SELECT 'pending'::text AS state, count(*) AS messages FROM {schema}.message_pending
    UNION ALL SELECT 'sent', count(*) FROM {schema}.message WHERE state = 'sent'
    UNION ALL SELECT 'parked', count(*) FROM {schema}.message_parked
    UNION ALL SELECT 'quarantined', count(*) FROM {schema}.message_quarantined
    UNION ALL SELECT 'discarded', count(*) FROM {schema}.message_discarded;
"""

STATE = """
CREATE VIEW {schema}.message_state AS SELECT * FROM {schema}.message;
"""

# Parsed now, by BEGIN ATOMIC: a SET search_path would keep the function from being inlined.
SENT = """
CREATE FUNCTION {schema}.sent(since timestamptz, until timestamptz) RETURNS SETOF {schema}.message_state
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT * FROM {schema}.message_state WHERE state = 'sent' AND sent_at >= since AND sent_at < until;
END;
"""

DOWN = """
DROP FUNCTION {schema}.sent(timestamptz, timestamptz);
DROP VIEW {schema}.message_state;
DROP VIEW {schema}.message_count;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, COUNT, STATE, SENT, "RESET ROLE"):
        op.execute(script.format(schema=schema))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
