"""The console behind Debian's nginx and Caddy, with the blocks of docs/proxy.md, at a name's root and below a path."""

import re
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from playwright.async_api import Browser, expect
from structlog.testing import capture_logs

from relay.config.settings import Settings
from relay.console.access.tokens import TokenFile
from relay.operate.operation import Role
from tests.console.rows import waiting
from tests.console.site import serving_at, users
from tests.console.windows import LONG, NEEDS_CHROMIUM, expect_login, expect_state, log_in, open_tab
from tests.operate.rows import Rows
from tests.support.caddy import Caddy
from tests.support.certificates import Authority
from tests.support.events import named
from tests.support.front_proxy import FrontProxy
from tests.support.nginx import Nginx

PAGE = Path(__file__).parents[2] / "docs" / "proxy.md"
TABS = 8
FORGED = {"X-Forwarded-For": "203.0.113.9"}  # by a client


def block(heading: str, begin: str) -> str:
    """Return the first block below a heading of the page that begins so."""
    text = PAGE.read_text().partition(f"## {heading}\n")[2]
    found = re.search(rf"^    {begin} \{{\n.*?^    \}}\n", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def nginx(heading: str, files: dict[str, bytes]) -> Nginx:
    text = block(heading, "server").replace("listen 443 ssl", "listen 127.0.0.1:{port} ssl")
    return Nginx(text.replace("/etc/ssl/", "{folder}/"), files)


def caddy(heading: str, files: dict[str, bytes]) -> Caddy:
    """By a certificate of ours: the block leaves it to Caddy to ask for one."""
    host = r"(relay\.)?example\.org"
    ours = "https://127.0.0.1:{port} {\n    tls {folder}/relay.crt {folder}/relay.key\n"
    return Caddy(re.sub(rf"^    {host} \{{\n", ours, block(heading, host)), files)


class Proxy(NamedTuple):
    """A proxy and the heading of its block for a console at the root of a name."""

    heading: str
    make: Callable[[str, dict[str, bytes]], FrontProxy]


@pytest.fixture(
    params=[
        pytest.param(
            proxy,
            id=proxy.heading,
            marks=pytest.mark.skipif(
                not is_installed, reason=f"{proxy.heading} is not installed; as root, `tests/support/packages test`"
            ),
        )
        for proxy, is_installed in (
            (Proxy("nginx", nginx), Nginx.is_installed()),
            (Proxy("Caddy", caddy), Caddy.is_installed()),
        )
    ]
)
def proxy(request: pytest.FixtureRequest) -> Proxy:
    found: Proxy = request.param
    return found


def made(proxy: Proxy, heading: str, folder: Path, ports: dict[str, int]) -> FrontProxy:
    """Return a proxy with a block of the page, in front of consoles that listen on these ports."""
    certificate = Authority(folder).issue("localhost", "127.0.0.1")
    files = {"relay.crt": certificate.file.read_bytes(), "relay.key": certificate.key.read_bytes()}
    server = proxy.make(heading, files)
    for port, real in ports.items():
        assert server.text.count(f":{port}") == 1
        server.text = server.text.replace(f":{port}", f":{real}")
    return server


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(server: FrontProxy) -> str:
    return f"https://127.0.0.1:{server.port}"


def port_of(found: socket.socket) -> int:
    return int(found.getsockname()[1])


@NEEDS_CHROMIUM
async def test_many_tabs_of_a_browser_are_alive_behind_a_proxy(
    chromium: Browser, proxy: Proxy, settings: Settings, database_url: str, tmp_path: Path
) -> None:
    with listener() as behind:
        server = made(proxy, proxy.heading, tmp_path, {"8420": port_of(behind)})
        address = address_of(server)
        section = {**users(tmp_path), "origin": address, "trusted_proxies": "127.0.0.1"}
        with server:
            async with (
                serving_at(behind, settings, **section),
                await chromium.new_context(ignore_https_errors=True) as context,
            ):
                first = await open_tab(context, f"{address}/nodes")
                await log_in(first, Role.OWNER)
                await expect(first.locator("h1")).to_have_text("Nodes")
                tabs = [await open_tab(context, address) for _ in range(TABS)]
                waiting(database_url, "parked", 3)

                for tab in tabs:
                    await expect(tab.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)
                await first.get_by_role("button", name="Log out").click()
                await expect_login(first, *tabs)


@NEEDS_CHROMIUM
async def test_two_consoles_below_paths_of_one_host_work_in_one_browser(
    chromium: Browser, proxy: Proxy, settings: Settings, rows: Rows, tmp_path: Path
) -> None:
    rows.parked()
    file = TokenFile(tmp_path / "tokens")
    token = file.add("program", Role.VIEWER)
    async with AsyncExitStack() as running:
        sockets = [running.enter_context(listener()) for _ in range(2)]
        server = made(proxy, "Below a path", tmp_path, {"8420": port_of(sockets[0]), "8421": port_of(sockets[1])})
        running.enter_context(server)
        address = address_of(server)
        for base, behind in zip(("/billing", "/shop"), sockets, strict=True):
            section = {**users(tmp_path), "tokens": str(file.path), "origin": address + base}
            await running.enter_async_context(serving_at(behind, settings, environment=base, **section))
        context = await running.enter_async_context(await chromium.new_context(ignore_https_errors=True))

        billing = await open_tab(context, f"{address}/billing/routes")
        await log_in(billing, Role.OWNER)
        await expect(billing).to_have_url(f"{address}/billing/routes")
        shop = await open_tab(context, f"{address}/shop")
        await log_in(shop, Role.VIEWER)
        await expect(shop.locator(".verdict")).to_be_visible()
        await shop.get_by_role("link", name="Jobs").click()
        await expect(shop.locator("h1")).to_have_text("Jobs")
        await billing.get_by_text("Pause a route or a lane").click()
        await billing.get_by_label("Why the lane waits").fill("a test")
        await billing.get_by_role("button", name="Pause the lane").click()
        await expect(billing.locator("main")).to_contain_text("paused by owner")
        await expect(billing).to_have_url(f"{address}/billing/routes#pauses")
        await billing.get_by_role("link", name="Overview").click()
        await expect(billing.locator(".verdict")).to_contain_text("lane 0 is paused", timeout=LONG)
        await expect_state(billing, "warning")
        await expect_state(shop, "warning")
        async with httpx.AsyncClient(verify=False, base_url=address, timeout=60) as program:
            told = await program.get("/billing/api/v1/parked", headers={"Authorization": f"Bearer {token}"})
            stranger = await program.get("/shop/api/v1/parked")
            page = await program.get("/shop/jobs")

        names = {str(cookie["name"]) for cookie in await context.cookies()}

    assert len(told.json()["rows"]) == 1
    assert (stranger.status_code, stranger.headers["WWW-Authenticate"]) == (401, 'Bearer realm="outbox relay"')
    assert page.headers["Location"] == "/shop/login?next=%2Fjobs"
    assert names == {"__Host-relay.billing", "__Host-relay.shop"}


async def test_a_proxy_tells_the_address_of_a_client_that_forges_another(
    proxy: Proxy, settings: Settings, tmp_path: Path
) -> None:
    with listener() as behind, made(proxy, proxy.heading, tmp_path, {"8420": port_of(behind)}) as server:
        assert isinstance(server, FrontProxy)
        section = {**users(tmp_path), "origin": address_of(server), "trusted_proxies": "127.0.0.1"}
        async with (
            serving_at(behind, settings, **section),
            httpx.AsyncClient(verify=False, base_url=address_of(server), headers=FORGED, timeout=60) as client,
        ):
            await client.get("/login")
            with capture_logs() as events:
                form = {"name": "eve", "password": "guessed", "next": "/"}
                answer = await client.post("/login", data=form, headers={"Origin": address_of(server)})

    assert answer.status_code == 403
    assert [each["address"] for each in named(events, "console.login_failed")] == ["127.0.0.1"]
