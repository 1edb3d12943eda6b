"""The migrated database that those of the tests are copied from."""

import os
from datetime import UTC, datetime

from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer

# One for each process of pytest-xdist, since all of them share a given server.
NAME = f"migrated_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
MADE: set[tuple[int, str]] = set()


def template_of(server: PostgresServer) -> str:
    """Return one that was migrated today (UTC), for the days that it has begin with the day on which it was."""
    name = f"{NAME}_{datetime.now(UTC):%Y%m%d}"
    if (server.port, name) not in MADE:
        server.drop_database(name)  # a given server may have one
        migrate(DatabaseSettings(url=SecretStr(server.create_database(name))))
        MADE.add((server.port, name))
    return name
