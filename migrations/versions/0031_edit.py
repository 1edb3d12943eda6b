"""Let an operator send an edited copy of a parked row, and find rows in quarantine by their id.

`send_edited` writes the copy with the rights of the tables' owner. So operators need no right to write rows. The copy
keeps the role of its writer, and with it the order of that role's key. The function names the old message in the header
`x-edit-of`, and notes in the audit who has edited what. `sent_as` is the message id of the copy. It is unique there, so
a request that comes twice sends one copy.

The console looks for a message by its id in each state, again and again while its page is open.

Made as the owner of the tables, whichever role migrates. Roles that may change parked rows may send edited ones before
the roles are made again.

Lock: ACCESS EXCLUSIVE on operator_audit while its rows are checked, an instant for a million. SHARE on
message_quarantined until the index is built, 0.5 s for a million rows: a relay that sets rows aside waits for it.
"""

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

INDEX = "CREATE INDEX message_quarantined_row ON {schema}.message_quarantined (id)"

SENT_AS = """
ALTER TABLE {schema}.operator_audit ADD COLUMN sent_as uuid;
CREATE UNIQUE INDEX operator_audit_sent_as ON {schema}.operator_audit (sent_as) WHERE sent_as IS NOT NULL;
"""

# The commands that stand there stay, whichever migrations have added some.
ACCEPT = """
DO $do$
DECLARE
    taken text;
BEGIN
    SELECT string_agg(quote_literal(said[1]), ', ') INTO STRICT taken
    FROM pg_constraint, regexp_matches(pg_get_constraintdef(oid), '''([a-z -]+)''', 'g') AS said
    WHERE conrelid = '{schema}.operator_audit'::regclass AND conname = 'operator_audit_command'
        AND said[1] <> 'parked edit';
    EXECUTE format('ALTER TABLE {schema}.operator_audit DROP CONSTRAINT operator_audit_command,
        ADD CONSTRAINT operator_audit_command CHECK (command IN (%s))', taken || '{added}');
END $do$;
"""

# What is NULL stays as it is in the old row. Returns NULL when there is no such parked row.
SEND = """
CREATE FUNCTION {schema}.send_edited(
    edited bigint, copy_id uuid, new_payload json, new_bytes bytea, new_headers jsonb, sent_by text, reason text
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    made bigint;
BEGIN
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, sent_as)
    VALUES ('parked edit', edited::text, sent_by, reason, copy_id);
    INSERT INTO {schema}.message (message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers,
        content_type, payload, payload_bytes, trace_context, written_as)
    SELECT copy_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
        coalesce(new_headers, headers, '{{}}') || jsonb_build_object('x-edit-of', message_id), content_type,
        CASE WHEN new_payload IS NULL AND new_bytes IS NULL THEN payload ELSE new_payload END,
        CASE WHEN new_payload IS NULL AND new_bytes IS NULL THEN payload_bytes ELSE new_bytes END,
        trace_context, written_as
    FROM {schema}.message_parked WHERE id = edited
    RETURNING id INTO made;
    RETURN made;
END $$;
REVOKE EXECUTE ON FUNCTION {schema}.send_edited(bigint, uuid, json, bytea, jsonb, text, text) FROM PUBLIC;

DO $do$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT DISTINCT grantee::regrole AS role FROM pg_attribute, aclexplode(attacl)
        WHERE attrelid = '{schema}.message'::regclass AND attname = 'parked_at' AND privilege_type = 'UPDATE'
            AND grantee <> 0
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION'
            ' {schema}.send_edited(bigint, uuid, json, bytea, jsonb, text, text) TO %s', held.role);
    END LOOP;
END $do$;
"""

DOWN = """
DROP FUNCTION {schema}.send_edited(bigint, uuid, json, bytea, jsonb, text, text);
DROP INDEX {schema}.message_quarantined_row;
DELETE FROM {schema}.operator_audit WHERE command = 'parked edit';
ALTER TABLE {schema}.operator_audit DROP COLUMN sent_as;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, INDEX, SENT_AS, ACCEPT, SEND, "RESET ROLE"):
        op.execute(script.format(schema=schema, added=", ''parked edit''"))


def downgrade(schema: str) -> None:
    for script in (AS_OWNER, DOWN, ACCEPT, "RESET ROLE"):
        op.execute(script.format(schema=schema, added=""))
