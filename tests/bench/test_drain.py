"""The benchmark of a drain measures both storages: each row goes out and is marked once."""

from contextlib import closing

import psycopg
import pytest

from bench.frame import queue
from bench.frame.backlog import Keys, prepare
from bench.frame.drains import drain_backlog
from bench.frame.relay import BenchRelay
from bench.frame.servers import Servers
from bench.frame.storage import Storage, WhichStorage, stored

ROWS = 3000
MARKED = {
    Storage.PENDING: "SELECT array_agg(id ORDER BY id) FROM outbox.message_sent",
    Storage.LOG: "SELECT array_agg(id ORDER BY id) FROM outbox.receipt, unnest(ids) AS id",
}


@pytest.mark.drills
@pytest.mark.parametrize("which", [WhichStorage.PENDING, WhichStorage.LOG])
def test_each_row_of_a_backlog_goes_out_and_is_marked_once(servers: Servers, which: WhichStorage) -> None:
    backlog = prepare(servers.database_url, servers.folder, Keys.CDNOW, ROWS)
    with stored(servers, which) as databases:
        ((storage, database),) = databases.items()
        relay = BenchRelay(*database.urls, database.folder)
        for _ in range(2):  # the second time on emptied tables, with the same ids
            figures = drain_backlog(database, backlog, relay)

            assert (figures["lost"], queue.depth(servers.broker_url)) == (0, ROWS)
            assert min(figures["postgres_cpu"], figures["wal_bytes"]) > 0
            with closing(psycopg.connect(database.database_url)) as connection:
                assert connection.execute(MARKED[storage].encode()).fetchone() == (list(range(1, ROWS + 1)),)
