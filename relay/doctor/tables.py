"""The outbox tables: are they there, and may the relay's role do its work with them?"""

from collections.abc import Iterator

import psycopg
from psycopg.sql import SQL, Identifier

from relay.doctor.finding import Finding, Verdict
from relay.operate.revision import head_revision
from relay.settings import Settings

READ_REVISION = SQL("SELECT version_num FROM {schema}.migration")


def tables_at_head(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    check, schema, wanted = "database.tables", settings.database.schema_name, head_revision()
    try:
        row = connection.execute(READ_REVISION.format(schema=Identifier(schema))).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None
    found = row[0] if row else "none"
    if found == wanted:
        yield Finding(check, Verdict.OK, f"schema {schema} is of version {found}, as this release needs")
    elif row and found > wanted:  # a migration runs before the relays are replaced
        yield Finding(check, Verdict.OK, f"schema {schema} is of version {found}; this release needs {wanted}")
    else:
        words = f"schema {schema} is of version {found}; this release needs {wanted}"
        yield Finding(check, Verdict.FAILED, words, "run `relay migrate`, or check database.schema")
