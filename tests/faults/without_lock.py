"""A planted bug: the lock of a lane excludes no other relay."""

from typing import LiteralString

# The bug: a relay that asks for the lock of a lane gets yes for an answer, even if another relay holds it. It hits
# every relay on this database. Other locks work.
WITHOUT_LOCK: LiteralString = """
    CREATE SCHEMA planted;
    CREATE FUNCTION planted.pg_try_advisory_lock(integer, integer) RETURNS boolean LANGUAGE sql AS $$
        SELECT $1 = hashtext('outbox.lane') OR pg_catalog.pg_try_advisory_lock($1, $2)
    $$;
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET search_path = public, planted, pg_catalog', current_database());
    END $$
"""
