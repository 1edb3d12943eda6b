"""The repairs of the relay's alerts: each test makes the fault, runs the page's commands, and sees it gone."""

import asyncio
import shlex
from collections.abc import Iterator

import aio_pika
import psycopg
import pytest
from yarl import URL

from relay.config.settings import DatabaseSettings, Settings
from relay.operate.batches import BatchState, list_batches
from relay.operate.lanes import list_lanes, pause_lane
from relay.operate.session import session
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.rabbitmq import USER, RabbitServer
from tests.faults.alarms import ALARMS
from tests.http.conftest import RunSite
from tests.http.site import Site
from tests.operate.rows import Rows
from tests.runbooks.repair import Operator
from tests.support.days import Days
from tests.support.eventually import eventually

TOPOLOGY = """
[[topology.queues]]
name = "events"

[[topology.bindings]]
exchange = "outbox"
queue = "events"
routing_key = "invoice.#"
"""
BEGIN_BATCH = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)
    VALUES ('nightly-invoices', 20261121, -2, 4, gen_random_uuid(), '{}')
"""
TAKE_LANE = "SELECT pg_advisory_lock(hashtext('outbox.lane'), 3)"


@pytest.fixture
async def events(broker_url: str) -> None:
    """A queue that takes what goes to the default exchange with an invoice's key."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.declare_queue("events", durable=True)).bind(exchange, "invoice.#")


@pytest.fixture
def days(database_url: str) -> Iterator[Days]:
    days = Days(database_url)
    with days.connection:
        yield days


def states(rows: Rows) -> set[str]:
    return {state for state, _ in rows.states().values()}


def is_said(database: DatabaseSettings, words: str) -> bool:
    with session(database) as tables:
        return any(words in reason for reason in read_status(tables, progress_timeout=0.1).reasons)


def alarms(node: RabbitServer) -> set[str]:
    told = node.call("rabbit_alarm:get_alarms().")
    return {name for name in ALARMS if f"resource_limit,{name}" in told.replace(" ", "")}


async def has_lanes(site: Site, number: int) -> bool:
    return await site.value("outbox_lanes_held") == number


async def test_a_batch_that_is_given_up_is_unfinished_no_more(operator: Operator, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(BEGIN_BATCH)

        await operator.repair("OutboxBatchUnfinished")

        assert [each.state for each in list_batches(Tables(connection, "outbox"), limit=9)] == [BatchState.GIVEN_UP]


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("alert", ["OutboxRelayDown", "OutboxFewerRelays", "OutboxOldestPendingAge", "OutboxAgeBudget"])
async def test_a_relay_that_is_started_sends_what_waits(alert: str, operator: Operator, rows: Rows) -> None:
    rows.pending(created_at="2020-01-01T00:00:00Z")

    async with operator.repairing(alert):
        await eventually(lambda: states(rows) == {"sent"}, "it is sent")


async def test_a_lane_that_a_stranger_holds_comes_back(
    operator: Operator, run_site: RunSite, stranger: psycopg.AsyncConnection
) -> None:
    await stranger.execute(TAKE_LANE)
    async with run_site() as site:
        await eventually(lambda: has_lanes(site, 15), "a lane is missing")

        await operator.repair("OutboxLaneLost", PID=stranger.info.backend_pid)

        await eventually(lambda: has_lanes(site, 16), "all lanes are there")


async def test_a_session_that_holds_back_vacuum_ends(operator: Operator, stranger: psycopg.AsyncConnection) -> None:
    await operator.repair("OutboxSession", PID=stranger.info.backend_pid)

    with pytest.raises(psycopg.OperationalError):
        await stranger.execute("SELECT 1")


async def test_a_lane_that_was_paused_is_resumed(operator: Operator, database: DatabaseSettings) -> None:
    with session(database) as tables:
        pause_lane(tables, 3, by="ada", why="test")

        await operator.repair("OutboxPaused", LANE=3)

        assert [each.lane for each in list_lanes(tables) if each.paused_at] == []


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize(
    ("page", "words"), [("OutboxConsoleTask", "no relay is alive"), ("OutboxDoctor", "database.tables")]
)
async def test_the_command_line_shows_what_a_console_would(page: str, words: str, operator: Operator) -> None:
    assert words in await operator.repair(page)


@pytest.mark.usefixtures("events")
async def test_a_lock_that_stalls_the_relay_ends(
    operator: Operator, rows: Rows, run_site: RunSite, stranger: psycopg.AsyncConnection
) -> None:
    async with run_site(stall_after=1.0) as site:
        await eventually(site.is_ready, "ready")
        await stranger.execute("LOCK TABLE outbox.message_sent IN ACCESS EXCLUSIVE MODE")
        rows.pending()
        await eventually(lambda: site.is_unready("has locked message"), "it says so")

        await operator.repair("OutboxStalled", PID=stranger.info.backend_pid)

        await eventually(lambda: states(rows) == {"sent"}, "it is marked")
        await eventually(site.is_ready, "ready again")


async def test_an_overtaken_row_is_shown_with_the_others_of_its_key(operator: Operator, rows: Rows) -> None:
    late, other, later = rows.pending("1"), rows.pending("2"), rows.pending("1")

    shown = await operator.repair("OutboxRowsOvertaken", ID=late)

    assert [str(id_) in shown.split() for id_ in (late, other, later)] == [True, False, True]


async def test_parked_rows_are_sent_again(operator: Operator, rows: Rows) -> None:
    rows.parked("1")
    rows.parked("2")

    await operator.repair("OutboxParked")

    assert states(rows) == {"pending"}


async def test_a_stuck_key_goes_on_without_its_first_row(operator: Operator, rows: Rows) -> None:
    head = rows.parked("1")
    behind = rows.parked("1", behind=head)

    await operator.repair("OutboxKeyStuck", ID=head)

    assert rows.states()[behind] == ("pending", None)
    assert rows.states()[head][0] == "discarded"


async def test_a_route_without_a_queue_works_again(operator: Operator, rows: Rows, run_site: RunSite) -> None:
    (operator.folder / "relay.toml").write_text(TOPOLOGY)
    async with run_site() as site:
        await eventually(site.is_ready, "ready")
        rows.pending()
        await eventually(lambda: states(rows) == {"quarantined"}, "its route is in quarantine")

        await operator.repair("OutboxRouteQuarantined")

        await eventually(lambda: states(rows) == {"sent"}, "it is sent")


async def test_a_broker_without_its_alarms_takes_messages(operator: Operator) -> None:
    with RabbitServer(schedulers=1) as node:
        operator.add_program("rabbitmqctl", control_script(node))
        for raise_, _ in ALARMS.values():
            node.ctl(*raise_)
        await eventually(lambda: len(alarms(node)) == 2, "it has both alarms")

        await operator.repair("OutboxBrokerBlocked")

        await eventually(lambda: not alarms(node), "it has no alarm")


@pytest.mark.usefixtures("events")
async def test_a_user_gets_its_permissions_back(
    operator: Operator, settings: Settings, rabbitmq: RabbitServer, rows: Rows, run_site: RunSite
) -> None:
    vhost = URL(settings.broker.url.get_secret_value()).path.removeprefix("/")
    operator.add_program("rabbitmqctl", control_script(rabbitmq))
    await asyncio.to_thread(rabbitmq.ctl, "clear_permissions", "--vhost", vhost, USER)
    rows.pending()
    async with run_site(stall_after=0.5) as site:
        await eventually(lambda: site.is_unready("refused for"), "it is refused")

        rights = {"CONFIGURE": "outbox", "WRITE": "outbox", "READ": ""}
        await operator.repair("OutboxConnectionRefused", VHOST=vhost, USER=USER, **rights)

        await eventually(lambda: states(rows) == {"sent"}, "it is sent")


async def test_a_relay_that_lost_its_database_is_seen_to_be_back(
    operator: Operator, database: DatabaseSettings, rows: Rows, run_site: RunSite
) -> None:
    async with run_site(node="first") as site:
        await eventually(site.is_ready, "ready")
        rows.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'outbox-relay' AND datname = current_database()"
        )
        await eventually(lambda: not is_said(database, "no relay"), "its heartbeat is there")
        await eventually(site.is_ready, "ready again")

        told = await operator.repair("OutboxDatabaseLost")

    assert "first" in told


async def test_days_that_are_too_old_are_dropped(operator: Operator, days: Days) -> None:
    days.add(20, 3)
    days.add(2, 3)

    await operator.repair("OutboxRetentionBehind")

    assert days.past() == {2}


@pytest.mark.usefixtures("events")
async def test_a_forgotten_transaction_ends(
    operator: Operator, rows: Rows, run_site: RunSite, stranger: psycopg.AsyncConnection
) -> None:
    await stranger.execute("SELECT pg_current_xact_id()")
    async with run_site() as site:
        await eventually(site.is_ready, "ready")

        told = await operator.repair("OutboxLatencyBudget", PID=stranger.info.backend_pid)

    assert "pg_current_xact_id" in told
    with pytest.raises(psycopg.OperationalError):
        await stranger.execute("SELECT 1")


def control_script(node: RabbitServer) -> str:
    """Return a script that is `rabbitmqctl` on this node."""
    command, environment = node.control()
    told = shlex.join(f"{name}={value}" for name, value in environment.items())
    return f'#!/bin/sh\nexec env {told} {shlex.join(command)} "$@"\n'
