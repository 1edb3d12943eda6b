"""A row that tries its route just now is waited for, and named when it does not come back."""

import threading

import psycopg
import pytest

from relay.operate import quarantine
from relay.operate.quarantine import Changed, discard, list_routes
from tests.operate.rows import Rows
from tests.support.log import over_both_storages
from tests.support.process import wait_for

pytestmark = over_both_storages

WHY = {"by": "ada", "why": "too late"}
TRY = "UPDATE outbox.message SET state = 'pending' WHERE id = %s"  # as the relay does, which keeps the route's number
PUT_BACK = "UPDATE outbox.message SET state = 'quarantined' WHERE id = %s"


def test_a_probe_that_comes_back_is_changed_with_the_others(rows: Rows, connection: psycopg.Connection) -> None:
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    (route,) = list_routes(connection, "outbox")
    rows.connection.execute(TRY, [probe])
    done: list[Changed] = []

    changing = threading.Thread(target=lambda: done.append(discard(connection, "outbox", route, [], **WHY)))
    changing.start()
    looked = f"SELECT FROM pg_stat_activity WHERE pid = {connection.info.backend_pid} AND query = 'COMMIT'"
    wait_for(lambda: rows.connection.execute(looked).rowcount > 0, "it has looked", 10)
    rows.connection.execute(PUT_BACK, [probe])
    changing.join(10)

    assert done == [Changed(route.id, 2, [])]
    assert rows.states() == {probe: ("discarded", None), other: ("discarded", None)}


def test_a_probe_that_stays_away_is_left_out(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "PROBE_WAIT", 0.0)
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    (route,) = list_routes(connection, "outbox")
    rows.connection.execute(TRY, [probe])

    done = discard(connection, "outbox", route, [], **WHY)

    assert done == Changed(route.id, 1, [f"{probe} is left as it is: it is pending, and tries route 1 just now"])
    assert rows.states() == {probe: ("pending", None), other: ("discarded", None)}
