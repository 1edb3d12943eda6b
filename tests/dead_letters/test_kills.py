"""A command that is killed, wherever it is, loses no letter: at most there is a copy with the same message id."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pamqp.commands import Basic

from tests.consume.effects import QUEUE
from tests.dead_letters.letters import DEAD, Letters
from tests.replay.conftest import Commands
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

RETRY = ("dead-letters", "retry", QUEUE, "--all", "--why", "again")
NOTED = "SELECT count(*) AS count FROM outbox.dead_letter_audit"
JOB = "SELECT state, done, failed FROM outbox.job"

Audit = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Iterator[Commands]:
    commands = Commands(tmp_path, RELAY_DATABASE_URL=database_url)
    yield commands
    commands.kill()


async def test_killed_before_the_confirm(letters: Letters, audit: Audit, relay: Commands) -> None:
    sent = await letters.put_all(5)
    await killed_at_an_ack(Way.DOWN, letters, relay, *RETRY)

    await eventually(lambda: letters.has(5), "all letters are back")
    assert audit.execute(NOTED).fetchone() == {"count": 0}
    assert set(await copies(letters)) <= set(sent)


async def test_killed_between_the_audit_and_the_ack(letters: Letters, audit: Audit, relay: Commands) -> None:
    """Sent and noted, and not acknowledged: the same command again sends it again."""
    sent = await letters.put_all(5)
    await killed_at_an_ack(Way.UP, letters, relay, *RETRY)

    await eventually(lambda: letters.has(5), "all letters are back")
    assert audit.execute(NOTED).fetchone() == {"count": 5}
    assert await copies(letters) == sent

    again = await relay(*RETRY, RELAY_BROKER_URL=letters.broker.url.get_secret_value())

    assert again.code == 0, again.said
    assert await copies(letters) == sent
    assert await letters.waiting() == 0


async def test_a_resumed_job_only_acknowledges_what_the_audit_has(
    letters: Letters, audit: Audit, relay: Commands
) -> None:
    sent = await letters.put_all(5)
    await killed_at_an_ack(Way.UP, letters, relay, *RETRY)
    await eventually(lambda: letters.has(5), "all letters are back")
    later = await letters.put(6)

    resumed = await relay("jobs", "resume", "1", RELAY_BROKER_URL=letters.broker.url.get_secret_value())

    assert resumed.code == 0, resumed.said
    assert await copies(letters) == [*sent, later]
    assert await letters.waiting() == 0
    assert audit.execute(NOTED).fetchone() == {"count": 6}
    assert audit.execute(JOB).fetchone() == {"state": "done", "done": 6, "failed": 0}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
async def test_told_to_stop_it_says_so_and_the_rest_stays_in_order(
    letters: Letters, audit: Audit, relay: Commands, how: signal.Signals
) -> None:
    sent = await letters.put_all(30)
    retrying = relay.start(*RETRY, "--rate", "5", RELAY_BROKER_URL=letters.broker.url.get_secret_value())

    async def has_begun() -> bool:
        return await letters.queue.ready_count() > 2

    await eventually(has_begun, "some are sent")
    retrying.tell(how)
    ended = await relay.end(retrying)

    went = await copies(letters)
    assert ended.code == 130
    assert f"sent {len(went)} letters of {DEAD} into {QUEUE}" in ended.said
    assert went == sent[: len(went)]
    assert audit.execute(NOTED).fetchone() == {"count": len(went)}
    await eventually(lambda: letters.has(len(sent) - len(went)), "the others are back")
    assert await letters.ids() == sent[len(went) :]


async def test_killed_while_letters_are_put_in_anew(letters: Letters, relay: Commands) -> None:
    """A list whose letters have come back three times: each is there with its copy, and can be read and sent."""
    sent = await letters.put_all(3)
    for _ in range(3):
        await letters.ids()
        await eventually(lambda: letters.has(3), "all letters are back")
    await killed_at_an_ack(Way.UP, letters, relay, "dead-letters", "list", QUEUE)

    await eventually(lambda: letters.has(6), "all letters are back")
    assert sorted(map(str, await letters.ids())) == sorted([*sent, *sent])


async def killed_at_an_ack(way: Way, letters: Letters, relay: Commands, *command: str) -> None:
    """Run a command until the first ack goes this way, hold the ack back, and kill the command."""
    async with proxied(letters.broker) as (proxy, far):
        proxy.on_frame(way, Basic.Ack, 1, Act.HOLD)
        begun = relay.start(*command, RELAY_BROKER_URL=far.url.get_secret_value())
        await proxy.wait_seen(way, Basic.Ack, 1)
        begun.stop(signal.SIGKILL)


async def copies(letters: Letters) -> list[str | None]:
    return [message.message_id for message in await letters.consumed()]
