"""A planted bug: the lock of a lane excludes no other relay."""

from typing import LiteralString

# The bug: whoever asks for the lock of a lane is told that it has it, whether it is free or not. Every relay on this
# database has it; what else it locks it does lock.
WITHOUT_LOCK: LiteralString = """
    CREATE SCHEMA planted;
    CREATE FUNCTION planted.pg_try_advisory_lock(integer, integer) RETURNS boolean LANGUAGE sql AS $$
        SELECT $1 = hashtext('outbox.lane') OR pg_catalog.pg_try_advisory_lock($1, $2)
    $$;
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET search_path = public, planted, pg_catalog', current_database());
    END $$
"""
