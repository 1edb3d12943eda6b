"""What the PostgreSQL server is, and how it is set up."""

from collections.abc import Iterator

import psycopg

from relay.doctor.finding import Finding, Verdict
from relay.settings import Settings

OLDEST_SERVER = 15  # the oldest release that the tests run on


def server_version(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.version"
    version = connection.info.server_version
    words = f"PostgreSQL {connection.info.parameter_status('server_version')}"
    if version >= OLDEST_SERVER * 10_000:
        yield Finding(check, Verdict.OK, words)
    else:
        yield Finding(check, Verdict.FAILED, words, f"the relay needs PostgreSQL {OLDEST_SERVER} or later")
