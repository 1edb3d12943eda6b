"""`relay migrate`."""

import asyncio
import sys
from typing import Annotated

from cyclopts import Parameter

from relay.cli.options import DatabaseOptions
from relay.cli.printing import say
from relay.database import refuse_pooler
from relay.errors import UsageError
from relay.operate import migrate as operate
from relay.operate.session import session


def migrate(
    *,
    options: DatabaseOptions | None = None,
    sql: Annotated[bool, Parameter(help="Print the statements and connect to nothing.")] = False,
    check: Annotated[bool, Parameter(help="Change nothing; exit with 1 when the tables are behind.")] = False,
    downgrade: Annotated[
        str | None, Parameter(help="Go back to this version; `base` drops every table with all its rows.")
    ] = None,
) -> int:
    """Bring the outbox tables to the version of this release. Several may run at once."""
    if sum((sql, check, downgrade is not None)) > 1:
        raise UsageError("--sql, --check and --downgrade exclude each other")
    database = (options or DatabaseOptions()).load().settings.database
    if sql:
        operate.write_sql(database, sys.stdout)
        return 0
    asyncio.run(refuse_pooler(database))  # it holds a lock from one migration to the next
    if downgrade is not None:
        operate.downgrade(database, downgrade)
    elif not check:
        operate.migrate(database)
    if downgrade is None:
        with session(database):  # which refuses what is missing or behind
            pass
    say(f"schema {database.schema_name} is of version {operate.current_revision(database) or 'none'}")
    return 0
