"""The relay's role of `config/roles.sql` may replay, and may not rewrite what was replayed."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults
from tests.support.roles import granted_roles


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """The database as the relay's role sees it, as a URL."""
    with psycopg.connect(database_url, autocommit=True) as connection, granted_roles(connection):
        yield f"{database_url}?options=-crole%3Doutbox_relay"


async def test_the_relay_s_role_replays(role: str, relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(100)
    bad = await sent.add(1, event_type="x" * 250)  # longer than a routing key may be

    ended = await relay("replay", "--all", RELAY_DATABASE_URL=role)
    shown = await relay.ask("jobs", "show", "1", RELAY_DATABASE_URL=role)
    cancelled = await relay.ask("jobs", "cancel", "1", "--why", "test", "--yes", RELAY_DATABASE_URL=role)

    assert (ended.code, shown.code, cancelled.code) == (1, 0, 2), ended.said
    assert f"{bad[0]}\t" in shown.said
    assert faults(ids, await copies.read()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM outbox.job",
        "UPDATE outbox.job SET made_by = 'somebody else'",
        "UPDATE outbox.job SET filter = '{}'",
        "DELETE FROM outbox.job_failure",
        "UPDATE outbox.job_failure SET reason = ''",
    ],
)
def test_the_relay_s_role_keeps_the_record(role: str, statement: str) -> None:
    with psycopg.connect(role) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement.encode())
