"""An operator with the servers of a test, and what the tests of relays and consumers have."""

from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer
from tests.consume.conftest import inbox, queue, table
from tests.dead_letters.conftest import letters
from tests.http.conftest import rows, run_site
from tests.runbooks.repair import Operator

__all__ = ["inbox", "letters", "queue", "rows", "run_site", "table"]  # fixtures


@pytest.fixture
def operator(tmp_path: Path, database_url: str, broker_url: str, postgres: PostgresServer) -> Operator:
    made = Operator(
        tmp_path, {"RELAY_DATABASE_URL": database_url, "RELAY_BROKER_URL": broker_url, "RELAY_NODE": "first"}
    )
    made.add_program("psql", f'#!/bin/sh\nexec "{postgres.program("psql")}" "$@"\n')
    return made
