"""`/livez` tells whether the process works, `/readyz` whether it can deliver, and why not."""

import asyncio
import json
import signal
import socket
import threading
from pathlib import Path

import pytest
from pamqp.commands import Basic

import relay.probes.server as served
from relay.config.settings import Settings
from relay.testing.servers.process import free_port
from tests.cli.command import Command
from tests.http.conftest import RunSite, StartRelay
from tests.http.site import Answer, Site
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way


async def test_ready_once_lanes_and_both_connections_are_there(settings: Settings, start_relay: StartRelay) -> None:
    async with proxied(settings.broker) as (proxy, far):
        proxy.hold(Way.DOWN)
        relay = start_relay(RELAY_BROKER_URL=far.url.get_secret_value())
        await relay.wait_for_log("lanes.taken")
        unready = await relay.site.get("/readyz")
        live = await relay.site.get("/livez")

        proxy.release(Way.DOWN)
        await eventually(relay.site.is_ready, "ready")

    assert (unready.status, unready.body) == (503, "broker: not connected yet\n")
    assert (live.status, live.body) == (200, "ok\n")


async def test_a_lost_broker_makes_it_unready_and_not_dead(settings: Settings, start_relay: StartRelay) -> None:
    async with proxied(settings.broker) as (proxy, far):
        relay = start_relay(RELAY_BROKER_URL=far.url.get_secret_value())
        await relay.wait_for_log("relay.ready")

        proxy.refusing = True
        proxy.cut()
        await eventually(lambda: relay.site.is_unready("broker: "), "unready")
        assert (await relay.site.get("/livez")).status == 200

        proxy.refusing = False
        await eventually(relay.site.is_ready, "ready again")


async def test_a_lost_database_makes_it_unready(settings: Settings, start_relay: StartRelay) -> None:
    async with proxied(settings.database) as (proxy, far):
        relay = start_relay(RELAY_DATABASE_URL=far.url.get_secret_value())
        await relay.wait_for_log("relay.ready")

        proxy.refusing = True
        proxy.cut()
        await eventually(lambda: relay.site.is_unready("database: "), "unready")
        assert "lanes: none held" in (await relay.site.get("/readyz")).body
        assert (await relay.site.get("/livez")).status == 200

        proxy.refusing = False
        await eventually(relay.site.is_ready, "ready again")


async def test_one_that_stands_by_is_ready_only_for_who_asks_for_that(run_site: RunSite) -> None:
    async with run_site(node="first") as first:
        await eventually(first.is_ready, "ready")
        async with run_site(node="second", standby=True) as second:
            await eventually(lambda: second.is_unready("lanes: other nodes hold them; standing by"), "it stands by")
            await eventually(lambda: stands_by(second), "it could take the lanes")
            assert (await second.get("/readyz?standby=no")).status == 503


async def test_one_whose_name_another_has_could_take_its_place(run_site: RunSite) -> None:
    async with run_site(node="twin", standby=True) as second:
        async with run_site(node="first") as other:
            await eventually(other.is_ready, "ready")
            async with run_site(node="twin") as twin:
                await eventually(lambda: twin.is_unready("lanes: another relay has its name"), "it waits for its name")
                await eventually(lambda: stands_by(twin), "a rolling update goes on")
                assert (await twin.get("/readyz")).body == "lanes: another relay has its name\n"
        await eventually(second.is_ready, "the last one serves")


async def test_unready_while_it_drains(settings: Settings, rows: Rows, start_relay: StartRelay) -> None:
    async with proxied(settings.broker) as (proxy, far):
        relay = start_relay(RELAY_BROKER_URL=far.url.get_secret_value(), RELAY_DRAIN_TIMEOUT="60")
        await relay.wait_for_log("relay.ready")
        assert (await relay.site.get("/readyz")).status == 200
        proxy.hold(Way.DOWN)
        rows.pending()
        await proxy.wait_seen(Way.UP, Basic.Publish, 1)

        relay.process.tell(signal.SIGTERM)
        await relay.wait_for_log("relay.draining")
        draining = await relay.site.get("/readyz")
        live = await relay.site.get("/livez")
        proxy.release(Way.DOWN)

        assert await relay.wait_for_end() == 0
    assert (draining.status, draining.body) == (503, "relay: draining: it was told to stop\n")
    assert live.status == 200
    assert "drain.timed_out" not in relay.log.read_text()


async def test_a_loop_that_hangs_is_not_live(run_site: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "LOOP_ANSWERS_WITHIN", 0.5)
    answers: list[Answer] = []
    async with run_site() as site:
        await eventually(site.is_ready, "ready")
        asking = threading.Thread(target=lambda: answers.extend(map(site.ask, ("/livez", "/readyz", "/metrics"))))
        asking.start()

        asking.join(30)  # which is what hangs

        monkeypatch.setattr(served, "LOOP_ANSWERS_WITHIN", 20.0)
        assert (await site.get("/livez")).status == 200
    assert [answer.status for answer in answers] == [503, 503, 503]
    assert {answer.body for answer in answers} == {"the event loop: no answer within 0.5 s\n"}


async def test_another_path_or_method_is_refused(run_site: RunSite) -> None:
    async with run_site() as site:
        unknown = await site.get("/")
        host, _, port = site.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /livez HTTP/1.1\r\nHost: relay\r\n\r\n")
        posted = await reader.readline()
        writer.close()
        await writer.wait_closed()

    assert (unknown.status, unknown.body) == (404, "there are /livez, /readyz and /metrics\n")
    assert posted.split()[1] == b"405"


async def test_clients_that_say_nothing_or_leave_disturb_nobody(start_relay: StartRelay) -> None:
    relay = start_relay()
    await relay.wait_for_log("relay.ready")
    host, _, port = relay.site.address.partition(":")
    mute = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    for _, writer in mute[:10]:
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        writer.transport.abort()

    assert (await relay.site.get("/livez")).status == 200

    relay.process.stop(signal.SIGTERM)
    assert relay.process.returncode == 0
    assert "Traceback" not in relay.log.read_text()
    assert all(line.startswith("{") for line in relay.log.read_text().splitlines())
    for _, writer in mute[10:]:
        writer.close()


def test_a_taken_port_is_one_clear_error(tmp_path: Path, database_url: str, broker_url: str) -> None:
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        ended = relay.process("run", RELAY_HTTP_LISTEN=address)

    assert (ended.code, ended.out) == (1, "")
    (told,) = [json.loads(line) for line in ended.err.splitlines()]
    assert (told["event"], told["exit_code"]) == ("relay.failed", 1)
    assert told["error"] == (
        f"http.listen = {address}: Address already in use; name another address (RELAY_HTTP_LISTEN), or leave it empty"
    )


@pytest.mark.parametrize("address", ["8080", ":8080", "0.0.0.0", "0.0.0.0:0", "0.0.0.0:65536", "http://h:80", "::1:80"])
def test_what_is_no_address_is_refused(address: str, tmp_path: Path) -> None:
    ended = Command(tmp_path)("run", RELAY_HTTP_LISTEN=address)

    assert ended.code == 2
    assert ended.err.startswith(f"relay: http.listen = '{address}' (variable RELAY_HTTP_LISTEN): it takes address:port")


async def test_it_listens_where_it_is_told(start_relay: StartRelay) -> None:
    port = free_port()
    relay = start_relay(RELAY_HTTP_LISTEN=f"[::1]:{port}")
    await relay.wait_for_log("http.listening")

    assert (await Site(f"[::1]:{port}").get("/livez")).status == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def stands_by(site: Site) -> bool:
    return (await site.get("/readyz?standby=ok")).status == 200
