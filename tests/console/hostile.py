"""An outbox whose every text is hostile, as far as its tables take it."""

from typing import LiteralString

import psycopg
from psycopg.sql import SQL, Identifier

# Markup, attributes and handlers; a scheme; templates; a formula; text that runs backwards, and a terminal's colour.
MARKUP = (
    "\"'><img src=x onerror=alert(1)><svg/onload=alert(2)></td></script><script>alert(3)</script>"
    "{{7*7}}${7*7}<a href=javascript:alert(4) style=color:red>\u202e\x1b[31m"
)
SCHEME = "javascript:alert(5)//"
FORMULA = "=HYPERLINK(1)"

COLUMNS: LiteralString = """
    SELECT relname, attname, format_type(atttypid, NULL) FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
    WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
        AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
        AND format_type(atttypid, NULL) IN ('text', 'text[]', 'character varying', 'jsonb', 'json')
        AND relname <> 'migration'
    ORDER BY relname, attname
"""
# Words of ours that no constraint names, which no application writes.
KEPT = {
    ("job", "filter"), ("batch", "row_counts"), ("failure", "id"), ("failure", "source"), ("parked_failure", "failure"),
}  # fmt: skip
CHANGES: dict[str, LiteralString] = {
    "text": "UPDATE outbox.{table} SET {column} = %(text)s || {column}",
    "character varying": "UPDATE outbox.{table} SET {column} = %(text)s || {column}",
    "text[]": "UPDATE outbox.{table} SET {column} = ARRAY[%(text)s] || {column}",
    "jsonb": "UPDATE outbox.{table} SET {column} = jsonb_build_object(%(text)s::text, %(text)s::text)",
    "json": "UPDATE outbox.{table} SET {column} = json_build_object(%(text)s::text, %(text)s::text)",
}


def make_hostile(url: str, text: str) -> list[str]:
    """Put a text before every text of every row; return the columns that took it."""
    taken = []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # no trigger, and no foreign key
        for table, column, kind in connection.execute(COLUMNS).fetchall():
            if (table, column) in KEPT:
                continue
            change = SQL(CHANGES[kind]).format(table=Identifier(table), column=Identifier(column))
            try:
                connection.execute(change, {"text": text})
            except (psycopg.errors.CheckViolation, psycopg.errors.StringDataRightTruncation):
                continue  # a state, or a name of ours
            taken.append(f"{table}.{column}")
        changed = SQL("UPDATE outbox.job SET filter = jsonb_build_object('event_type', %s::text)")
        connection.execute(changed, [text])
    return taken
