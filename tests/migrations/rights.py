"""What each role of config/roles.sql may do with the outbox, as text that a reader can check.

`tests/migrations/rights.txt` is that text. After a change of tables or rights:

    .venv/bin/python -m tests.migrations.rights

and look at the difference, which is what the change gives away. `public` is every login: what it may is not repeated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from relay.testing.servers.postgres import PostgresServer
from tests.support.releases import NEWEST
from tests.support.roles import NAMES, SCRIPT
from tests.support.template import template_of

FILE = Path(__file__).with_name("rights.txt")
PUBLIC: LiteralString = "public"  # every login

SCHEMAS: LiteralString = """
    SELECT 'schema ' || nspname, lower(privilege)
    FROM pg_namespace, unnest(ARRAY['USAGE', 'CREATE']) WITH ORDINALITY AS each (privilege, place)
    WHERE nspname LIKE 'outbox%%' AND has_schema_privilege(%(role)s, oid, privilege)
    ORDER BY nspname, place
"""
# MAINTAIN is a right from PostgreSQL 17 on.
TABLES: LiteralString = """
    WITH each AS (
        SELECT regexp_replace(relname, '_[0-9]{8}$', '_<day>') AS name, pg_class.oid AS class, privilege, place
        FROM pg_class, unnest(
            ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']
            || CASE WHEN current_setting('server_version_num')::int < 170000 THEN '{}' ELSE '{MAINTAIN}'::text[] END
        ) WITH ORDINALITY AS privileges (privilege, place)
        WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
    ),
    held AS (
        SELECT name, privilege, place, NULL AS columns FROM each WHERE has_table_privilege(%(role)s, class, privilege)
        UNION
        SELECT name, privilege, place, string_agg(attname::text, ', ' ORDER BY attname)
        FROM each JOIN pg_attribute ON attrelid = class AND attnum > 0 AND NOT attisdropped
        WHERE privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
            AND NOT has_table_privilege(%(role)s, class, privilege)
            AND has_column_privilege(%(role)s, class, attnum, privilege)
        GROUP BY name, class, privilege, place
    )
    SELECT 'table ' || name, lower(privilege) || coalesce(' (' || columns || ')', '') FROM held ORDER BY name, place
"""
SEQUENCES: LiteralString = """
    SELECT 'sequence ' || relname, lower(privilege)
    FROM pg_class, unnest(ARRAY['USAGE', 'SELECT', 'UPDATE']) WITH ORDINALITY AS each (privilege, place)
    WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'S' AND has_sequence_privilege(%(role)s, oid, privilege)
    ORDER BY relname, place
"""
FUNCTIONS: LiteralString = """
    SELECT format('function %%s(%%s)', proname, oidvectortypes(proargtypes)), 'execute'
    FROM pg_proc
    WHERE pronamespace = 'outbox'::regnamespace AND has_function_privilege(%(role)s, oid, 'EXECUTE')
        AND (%(role)s = 'public' OR NOT has_function_privilege('public', oid, 'EXECUTE'))
    ORDER BY 1
"""
AS_OWNER: LiteralString = """
    SELECT format('function %s(%s)', proname, oidvectortypes(proargtypes)), array_to_string(proconfig, ' ')
    FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace AND prosecdef
    ORDER BY 1
"""


def rights(connection: psycopg.Connection[Any]) -> str:
    """Return what each role may do, and what every login may, in a database where config/roles.sql has run."""
    return "\n".join(_lines(connection)) + "\n"


def _lines(connection: psycopg.Connection[Any]) -> Iterator[str]:
    for name in (PUBLIC, *NAMES):
        held: dict[str, list[str]] = {}
        for statement in (SCHEMAS, TABLES, SEQUENCES, FUNCTIONS):
            for thing, right in connection.execute(statement, {"role": name}):
                held.setdefault(thing, []).append(right)
        yield from (f"{name} may", *(f"    {thing}: {', '.join(held[thing])}" for thing in held), "")
    yield "with the rights of the owner run"
    for thing, path in connection.execute(AS_OWNER):
        yield f"    {thing}: {path}"


def main() -> None:
    with PostgresServer(NEWEST) as server:
        url = server.create_database("rights", template=template_of(server))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(SCRIPT.encode())
            FILE.write_text(rights(connection))


if __name__ == "__main__":
    main()
