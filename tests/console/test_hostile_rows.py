"""Whatever a lesser role writes, each reader goes on, and shows the other rows.

`tests/console/hostile_rows.py` has the values, and asks the database which columns the roles may write.
"""

import asyncio
import re
from collections import Counter
from functools import partial
from html import unescape
from pathlib import Path

import httpx
import psycopg
import pytest

from relay.config.settings import BrokerSettings, Settings
from relay.consume import Consumer, Inbox
from relay.probes import cached_answer
from tests.cli.command import Command
from tests.console.api.program import Program
from tests.console.hostile_rows import FEW, Planted, change_few, plant, prepare
from tests.console.site import browser, running
from tests.consume.conftest import inbox, queue, table
from tests.consume.effects import Queue, count
from tests.http.conftest import RunSite, run_site
from tests.http.consumers import serving
from tests.http.site import Site
from tests.support.eventually import eventually

__all__ = ["inbox", "queue", "run_site", "table"]  # fixtures

# What each list must show also among hostile rows: what `fill` has put there.
LISTS = {
    "status": "relay-1",
    "lanes list": "15",
    "failures list": "Paid",
    "failures list --held": "no such customer",
    "parked list --limit 5000": "Paid",
    "parked list --limit 5000 --held": "Paid",
    "parked list --archived --limit 5000": "Paid",
    "quarantine list": "nowhere",
    "jobs list --limit 5000": "ada",
    "held list --limit 5000": "customer/7",
    "pool status": "billing",
    "retention --dry-run": "message_sent",
    "replay --all --dry-run": "",
    "reconcile --since 1d --consumer billing": "billing",
    "reconcile --since 1d": "billing",
    "doctor": "database.tables",
}
MAY_FIND = ("reconcile", "doctor")  # exit code 1 is what they have found
CALLS = {
    "status": "relay-1",
    "nodes": "relay-1",
    "lanes": "15",
    "failures": "Paid",
    "failures?held=true": "no such customer",
    "jobs?limit=500": "ada",
    "parked?limit=500": "Paid",
    "parked?held=true&limit=500": "Paid",
    "parked?archived=true&limit=500": "Paid",
    "parked/preview": "",
    "quarantine": "nowhere",
    "pool/status": "billing",
    "retention": "message_sent",
    "replay/preview": "",
    "reconcile?since=1d": "billing",
    "doctor": "database.tables",
    "topology": "",
}
IDS = {
    "jobs": "SELECT id FROM outbox.job ORDER BY id",
    "quarantine": "SELECT id FROM outbox.quarantine WHERE id > 0 ORDER BY id",
}
PARKED = "SELECT id FROM outbox.message WHERE state IN ('parked', 'archived', 'discarded') ORDER BY id"
MESSAGES = "SELECT id FROM outbox.message WHERE state <> 'sent' ORDER BY id"
LINK = re.compile(r'<a\b[^>]*\bhref="(/[^"]*)"')
MOST = 60  # followed links of each kind of page


@pytest.fixture
def planted(database_url: str) -> Planted:
    return plant(database_url)


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_answer, "FRESH_FOR", 0.0)
    monkeypatch.setattr(cached_answer, "SHARE", 0)


def ids(url: str, statement: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [str(id_) for (id_,) in connection.execute(statement.encode())]


def test_each_column_gets_hostile_values_or_refuses_them(planted: Planted) -> None:
    columns = [(name, column) for name, columns in planted.columns.items() if name not in FEW for column in columns]

    refusals = set().union(*planted.refused.values())
    assert refusals <= {"23503", "23505", "23514"}  # by a foreign key, a key or a CHECK
    assert {each for each in columns if not planted.taken[each] and not planted.refused.get(each)} == set()
    assert sum(planted.taken[each] > 0 for each in columns) > 120


@pytest.mark.usefixtures("planted")
def test_each_command_lists_and_shows_them(database_url: str, broker_url: str, tmp_path: Path) -> None:
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)

    for command, shown in LISTS.items():
        for output in "text", "json":
            told = relay(*command.split(), "--output", output)
            assert told.code in ((0, 1) if command.startswith(MAY_FIND) else (0,)), (command, told)
            assert shown in told.out, (command, told)
    for noun, statement in IDS.items():
        for number, id_ in enumerate(ids(database_url, statement)[::2]):  # the API shows each
            told = relay(noun, "show", id_, "--output", ("text", "json")[number % 2])
            assert told.code == 0, (noun, id_, told)


@pytest.mark.usefixtures("planted")
@pytest.mark.every_postgres
async def test_the_api_lists_them(settings: Settings) -> None:
    async with running(settings) as app, browser(app) as client:
        lists = {f"/api/v1/{call}": shown for call, shown in CALLS.items()}
        wrong = {path: told for path, shown in lists.items() if (told := await _fault(client, path, shown))}

    assert wrong == {}


@pytest.mark.drills
@pytest.mark.usefixtures("planted")
async def test_the_api_and_the_pages_show_each_of_them(settings: Settings, database_url: str) -> None:
    """Every row is hostile, in each column that a lesser role may write; no page or answer fails."""
    details = [f"/messages/{id_}" for id_ in ids(database_url, MESSAGES)]
    for noun, statement in IDS.items():
        details += [f"/api/v1/{noun}/{id_}" for id_ in ids(database_url, statement)]
    async with running(settings) as app, browser(app) as client:
        wrong = {path: told for path in details if (told := await _fault(client, path))}
        wrong |= await _faults_of_links(client)

    assert wrong == {}


@pytest.mark.usefixtures("planted")
async def test_the_api_reveals_each_of_them(settings: Settings, database_url: str, tmp_path: Path) -> None:
    async with Program.running(settings, tmp_path) as program:
        paths = [f"/parked/{id_}/reveal" for id_ in ids(database_url, PARKED)]
        wrong = {path: told for path in paths if (told := _told(await program.post(path, {})))}

    assert wrong == {}


async def _fault(client: httpx.AsyncClient, path: str, shown: str = "") -> str:
    return _told(await client.get(path), shown)


def _told(answer: httpx.Response, shown: str = "") -> str:
    return "" if answer.status_code == 200 and shown in answer.text else f"{answer.status_code}: {answer.text[-500:]}"


async def _faults_of_links(client: httpx.AsyncClient) -> dict[str, str]:
    """Follow the links of the pages; an address with an odd id of a row may be refused, and is no fault."""
    paths, followed, wrong = ["/", "/reconcile?since=1d"], Counter[str](), {}
    for path in paths:  # it grows
        answer = await client.get(path, follow_redirects=True)
        if answer.status_code >= 500:
            wrong[path] = answer.text[-500:]
        for link in map(unescape, LINK.findall(answer.text)):
            kind = re.split(r"[?\d]", link)[0]
            if link not in paths and followed[kind] < MOST:
                followed[kind] += 1
                paths.append(link)
    assert {"/failures", "/jobs", "/routes", "/nodes", "/retention", "/audit", "/doctor"} <= set(paths)
    return wrong


@pytest.mark.every_postgres
async def test_rows_that_can_only_be_changed_are_shown(
    settings: Settings, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    planted = prepare(database_url)
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)
    turn = 0
    async with running(settings) as app, browser(app) as client:
        while change_few(database_url, planted, turn):
            turn += 1
            for path in "/api/v1/lanes", "/api/v1/pool/status", "/routes", "/nodes":
                assert await _fault(client, path) == "", turn
            for command in "lanes list", "pool status":
                assert (await asyncio.to_thread(relay, *command.split())).code == 0

    assert turn > 10


@pytest.mark.usefixtures("planted")
@pytest.mark.every_postgres
async def test_a_relay_keeps_its_gauges_and_carries_the_other_rows(run_site: RunSite) -> None:
    async with run_site() as site:
        await eventually(
            lambda: _counts(site, "outbox_quarantined_messages", above=100), "hostile rows are settled", 30
        )
        await eventually(site.is_ready, "ready", 30)
        for gauge in "pending_messages", "oldest_pending_age_seconds", "parked_messages", "quarantined_routes":
            await eventually(partial(_counts, site, f"outbox_{gauge}", above=0), gauge, 30)


async def _counts(site: Site, name: str, *, above: float) -> bool:
    return ((await site.value(name)) or 0) > above


@pytest.mark.usefixtures("planted", "table")
async def test_a_consumer_keeps_its_gauges(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with serving(consumer) as site:
        await eventually(site.is_ready, "ready")
        metrics = await site.metrics()

    assert any(name == "outbox_consumer_held_messages" for name, _ in metrics)
