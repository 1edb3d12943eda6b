"""Every work, for the tests of what holds of each of them."""

import pytest

from relay.config.settings import Settings
from relay.operate.sent import work
from tests.consume.conftest import client, inbox, queue, table
from tests.dead_letters.conftest import letters
from tests.dead_letters.letters import Letters
from tests.jobs.benches import Bench, LettersBench, ParkedBench, ReplayBench, RouteBench, ToyBench
from tests.operate.conftest import connection, rows, tables
from tests.operate.rows import Rows
from tests.replay.conftest import copies, sent
from tests.replay.sent import Copies, SentRows

__all__ = ["client", "connection", "copies", "inbox", "letters", "queue", "rows", "sent", "table", "tables"]  # fixtures


@pytest.fixture(params=["toy", "parked", "route", "letters", "replay"])
def bench(
    request: pytest.FixtureRequest,
    settings: Settings,
    rows: Rows,
    letters: Letters,
    sent: SentRows,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    """Each work in turn."""
    monkeypatch.setattr(work, "SAVE_INTERVAL", 0.005)  # of a replay, whose few rows are else saved once
    match request.param:
        case "toy":
            return ToyBench(settings, rows)
        case "parked":
            return ParkedBench(settings, rows)
        case "route":
            return RouteBench(settings, rows)
        case "letters":
            return LettersBench(settings, letters)
        case _:
            return ReplayBench(settings, sent, copies)
