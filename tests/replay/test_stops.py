"""A replay that is told to stop does so at once, in the middle of whatever it does, and repeats nothing later."""

import signal
from typing import Any

import psycopg
import pytest
from yarl import URL

from relay.config.settings import Settings
from relay.jobs.job import Job, JobState
from relay.jobs.work import Save
from relay.operate.bulk import run_of, work_of
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.work import order_replay
from relay.operate.session import session as operator_session
from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults, repeats
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import FaultProxy, Way

RESUME = ("jobs", "resume", "1")
FAST = ("--rate", "100000")
TODAY = "SELECT to_char((now() - interval '1 minute') AT TIME ZONE 'UTC', 'YYYYMMDD')"  # as SentRows.add has it
WAITS = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
CUT = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name = 'outbox-relay replay' AND datname = current_database()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
async def test_a_replay_that_is_told_to_stop_saves_and_says_how_to_go_on(
    relay: Commands, settings: Settings, sent: SentRows, copies: Copies, how: signal.Signals
) -> None:
    ids = await sent.add(8000, keys=8)
    async with proxied(settings.broker) as (proxy, broker):
        proxy.delay[Way.DOWN] = 0.05  # rows wait for the confirms of their predecessors; all may go out in time
        variables = {"RELAY_BROKER_URL": broker.url.get_secret_value(), "RELAY_DRAIN_TIMEOUT": "30"}
        replaying = relay.start("replay", "--all", "--rate", "400", **variables)
        await copies.has(50)
        replaying.tell(how)
        interrupted = await relay.end(replaying)
    (job,) = await relay.jobs()
    resumed = await relay(*RESUME, *FAST)

    messages = await copies.read()
    assert interrupted.code == 130, interrupted.said
    assert "`relay jobs resume 1` goes on" in interrupted.said
    assert job["state"] == "interrupted"
    assert resumed.code == 0
    assert faults(ids, messages) == []
    assert repeats(messages) == 0


@pytest.mark.parametrize("list_of", ["a run that begins", "a run that lost its session"])
async def test_a_list_that_is_being_made_is_not_waited_for(
    relay: Commands, sent: SentRows, copies: Copies, list_of: str
) -> None:
    ids = await sent.add(8000, keys=300)
    day = f"outbox.message_sent_{await sent.value(TODAY)}"

    async def is_listing() -> bool:
        return bool(await sent.value(WAITS, day))

    replaying = relay.start("replay", "--all", "--rate", "400")
    await copies.has(20)
    if list_of == "a run that begins":
        replaying.stop(signal.SIGTERM)
    async with sent.connection.transaction():
        await sent.connection.execute(f"LOCK TABLE {day} IN ACCESS EXCLUSIVE MODE".encode())
        if list_of == "a run that begins":
            replaying = relay.start(*RESUME, "--rate", "400")
        else:
            await sent.value(CUT)  # what it has read goes out, then it lists again
        await eventually(is_listing, "it lists")
        replaying.stop(signal.SIGTERM)
    resumed = await relay(*RESUME, *FAST)

    assert replaying.returncode == 130, relay.said(replaying)
    assert "Traceback" not in relay.said(replaying)
    assert resumed.code == 0
    assert faults(ids, await copies.read()) == []


async def test_a_replay_beside_a_silent_database_ends_in_its_time(
    relay: Commands, sent: SentRows, copies: Copies, settings: Settings
) -> None:
    await sent.add(8000, keys=300)
    url = URL(settings.database.url.get_secret_value())
    async with FaultProxy("127.0.0.1", url.port or 0, amqp=False) as proxy:
        to_proxy = {"RELAY_DATABASE_URL": str(url.with_port(proxy.port)), "RELAY_DRAIN_TIMEOUT": "0.3"}
        replaying = relay.start("replay", "--all", "--rate", "400", **to_proxy)
        await copies.has(20)
        proxy.hold(Way.DOWN)
        # It saves several times a second, so now an answer is waited for.
        replaying.tell(signal.SIGTERM)
        ended = await relay.end(replaying, within=9)  # the driver alone would wait for 10 s

    assert "`relay jobs resume 1` goes on" in ended.said
    assert (await relay.jobs())[0]["state"] in {"running", "interrupted"}  # as far as the server knows


async def test_an_end_whose_answer_is_lost_is_an_end_and_no_cancel(
    settings: Settings, sent: SentRows, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sent.add(100, keys=5)
    with operator_session(settings.database) as tables:
        job = order_replay(tables, SentSelection())
    write = Save.write
    lost: list[str] = []

    async def write_and_lose_the_answer(
        save_: Save, connection: psycopg.AsyncConnection, job: Job, **options: Any
    ) -> None:
        await write(save_, connection, job, **options)
        if job.state is JobState.DONE and not lost:
            lost.append(job.state)
            await connection.close()
            raise psycopg.OperationalError("the connection was lost")

    monkeypatch.setattr(Save, "write", write_and_lose_the_answer)

    ended = await run_of(settings, job, work_of(settings, job)).run()

    assert (ended.state, lost) == (JobState.DONE, ["done"])
    await copies.has(100)
    assert await sent.value("SELECT state FROM outbox.job") == "done"
