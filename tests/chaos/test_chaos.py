"""A bug in every relay turns a run red."""

import asyncio
from pathlib import Path

import psycopg
import pytest

from tests.chaos import summary
from tests.chaos.fleet import private_servers
from tests.chaos.run import SHORTEST, run
from tests.faults.checker import Invariant
from tests.faults.without_lock import WITHOUT_LOCK

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]


def test_relays_that_take_lanes_without_the_lock(tmp_path: Path) -> None:
    """When the lock of a lane excludes no other relay, the run fails and names the invariant that is broken."""
    with private_servers() as servers:
        with psycopg.connect(servers.database_url, autocommit=True) as connection:
            connection.execute(WITHOUT_LOCK)

        outcome = asyncio.run(run(servers, 7, SHORTEST, tmp_path, print))

    assert Invariant.ONE_OWNER in summary.failures(outcome)
    assert not summary.is_passed(outcome)
