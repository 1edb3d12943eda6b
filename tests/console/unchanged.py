"""All that an outbox holds, in a form that tells whether anything was changed."""

from typing import LiteralString

import psycopg
from psycopg.sql import SQL, Identifier

TABLES: LiteralString = """
    SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' ORDER BY relname
"""


def everything(url: str) -> dict[str, str]:
    """Return for each table of the outbox a text that differs when a row differs."""
    read = SQL("SELECT md5(coalesce(string_agg(row::text, chr(10) ORDER BY row::text), '')) FROM outbox.{} AS row")
    with psycopg.connect(url) as connection:
        names = [name for (name,) in connection.execute(TABLES)]
        return {name: connection.execute(read.format(Identifier(name))).fetchall()[0][0] for name in names}
