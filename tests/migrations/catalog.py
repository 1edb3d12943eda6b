"""Everything that a schema consists of, as text that can be compared."""

import psycopg

DESCRIPTION = """
    WITH spaces AS (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s),
    tables AS (SELECT class.* FROM pg_class AS class JOIN spaces ON class.relnamespace = spaces.oid)
    SELECT format('%%s %%s %%s %%s %%s', relkind, relname, reloptions, pg_get_expr(relpartbound, oid), relreplident)
    FROM tables
    UNION ALL
    SELECT format('%%s.%%s %%s %%s %%s %%s', relname, attname, format_type(atttypid, atttypmod), attnotnull,
                  attgenerated, pg_get_expr(adbin, adrelid))
    FROM tables JOIN pg_attribute ON attrelid = tables.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    UNION ALL
    SELECT format('%%s: %%s %%s', relname, conname, pg_get_constraintdef(pg_constraint.oid))
    FROM tables JOIN pg_constraint ON conrelid = tables.oid
    UNION ALL
    SELECT format('%%s: %%s', relname, pg_get_viewdef(oid)) FROM tables WHERE relkind = 'v'
    UNION ALL
    SELECT format('%%s %%s', pg_get_indexdef(indexrelid), indisreplident)
    FROM tables JOIN pg_index ON indrelid = tables.oid
    UNION ALL
    SELECT pg_get_triggerdef(pg_trigger.oid) FROM tables JOIN pg_trigger ON tgrelid = tables.oid AND NOT tgisinternal
    UNION ALL
    SELECT format('%%s %%s', pg_get_functiondef(pg_proc.oid), proacl)
    FROM pg_proc JOIN spaces ON pronamespace = spaces.oid
    ORDER BY 1
"""


def description(url: str, schema: str = "outbox") -> list[str]:
    """Return tables, columns, constraints, views, indexes, triggers and functions of a schema."""
    with psycopg.connect(url) as connection:
        return [text for (text,) in connection.execute(DESCRIPTION, {"schema": schema})]
