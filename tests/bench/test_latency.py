"""The benchmark of latency measures both storages: every row that is written is confirmed and marked."""

import pytest

from bench.frame.servers import Servers
from bench.frame.storage import WhichStorage, stored
from bench.frame.watched_relay import watched_relay
from bench.latency import measure_waits


@pytest.mark.drills
@pytest.mark.parametrize("which", [WhichStorage.PENDING, WhichStorage.LOG])
def test_each_commit_is_confirmed_and_marked(servers: Servers, which: WhichStorage) -> None:
    with stored(servers, which) as databases:
        ((where, database),) = databases.items()
        with watched_relay(database, node=where) as watched:
            figures = measure_waits(watched, 50.0, 1.0)

    assert {one.get("lost", 0) for one in figures.values()} == {0}
    assert all(one["p50"] > 0 for one in figures.values())
