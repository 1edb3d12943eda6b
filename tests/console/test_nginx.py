"""The console behind Debian's nginx, with the blocks of docs/proxy.md, at the root of a name and below a path."""

import re
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from relay.config.settings import Settings
from relay.console.access.tokens import TokenFile
from relay.operate.operation import Role
from tests.console.rows import waiting
from tests.console.site import serving_at, users
from tests.console.windows import LONG, NEEDS_CHROMIUM, expect_state, log_in, open_tab
from tests.operate.rows import Rows
from tests.support.certificates import Authority
from tests.support.nginx import Nginx, is_installed

PAGE = Path(__file__).parents[2] / "docs" / "proxy.md"
TABS = 8

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="nginx is not installed; as root, `tests/support/packages test`"
)


def block(heading: str) -> str:
    """Return the first block `server` of nginx below a heading of the page."""
    text = PAGE.read_text().partition(f"## {heading}\n")[2]
    found = re.search(r"^    server \{\n.*?^    \}\n", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


class Proxy:
    """nginx with a block of the page, in front of consoles that listen on these ports."""

    def __init__(self, heading: str, folder: Path, ports: dict[str, int]) -> None:
        certificate = Authority(folder).issue("localhost")
        text = block(heading).replace("listen 443 ssl", "listen 127.0.0.1:{port} ssl")
        text = text.replace("/etc/ssl/", "{folder}/")
        for port, real in ports.items():
            assert f":{port};" in text
            text = text.replace(f":{port};", f":{real};")
        files = {"relay.crt": certificate.file.read_bytes(), "relay.key": certificate.key.read_bytes()}
        self.server = Nginx(text, files)
        self.address = f"https://127.0.0.1:{self.server.port}"


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def port_of(found: socket.socket) -> int:
    return int(found.getsockname()[1])


@NEEDS_CHROMIUM
async def test_many_tabs_of_a_browser_are_alive_behind_nginx(
    chromium: Browser, settings: Settings, database_url: str, tmp_path: Path
) -> None:
    with listener() as behind:
        proxy = Proxy("nginx", tmp_path, {"8420": port_of(behind)})
        section = {**users(tmp_path), "origin": proxy.address, "trusted_proxies": "127.0.0.1"}
        with proxy.server:
            async with (
                serving_at(behind, settings, **section),
                await chromium.new_context(ignore_https_errors=True) as context,
            ):
                first = await open_tab(context, f"{proxy.address}/nodes")
                await log_in(first, Role.OWNER)
                await expect(first.locator("h1")).to_have_text("Nodes")
                tabs = [await open_tab(context, proxy.address) for _ in range(TABS)]
                waiting(database_url, "parked", 3)

                for tab in tabs:
                    await expect(tab.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)
                await first.get_by_role("button", name="Log out").click()
                await expect(first.get_by_label("Password")).to_be_visible(timeout=LONG)


@NEEDS_CHROMIUM
async def test_two_consoles_below_paths_of_one_host_work_in_one_browser(
    chromium: Browser, settings: Settings, rows: Rows, tmp_path: Path
) -> None:
    rows.parked()
    file = TokenFile(tmp_path / "tokens")
    token = file.add("program", Role.VIEWER)
    async with AsyncExitStack() as running:
        sockets = [running.enter_context(listener()) for _ in range(2)]
        proxy = Proxy("Below a path", tmp_path, {"8420": port_of(sockets[0]), "8421": port_of(sockets[1])})
        running.enter_context(proxy.server)
        for base, behind in zip(("/billing", "/shop"), sockets, strict=True):
            section = {**users(tmp_path), "tokens": str(file.path), "origin": proxy.address + base}
            await running.enter_async_context(serving_at(behind, settings, environment=base, **section))
        context = await running.enter_async_context(await chromium.new_context(ignore_https_errors=True))

        billing = await open_tab(context, f"{proxy.address}/billing/routes")
        await log_in(billing, Role.OWNER)
        await expect(billing).to_have_url(f"{proxy.address}/billing/routes")
        shop = await open_tab(context, f"{proxy.address}/shop/jobs")
        await log_in(shop, Role.VIEWER)
        await expect(shop.locator("h1")).to_have_text("Jobs")
        await billing.get_by_text("Pause a route or a lane").click()
        await billing.get_by_label("Why the lane waits").fill("a test")
        await billing.get_by_role("button", name="Pause the lane").click()
        await expect(billing.locator("main")).to_contain_text("paused by owner")
        await expect(billing).to_have_url(f"{proxy.address}/billing/routes#pauses")
        await billing.get_by_role("link", name="Overview").click()
        await expect(billing.locator(".verdict")).to_contain_text("lane 0 is paused", timeout=LONG)
        await expect_state(billing, "warning")
        await expect_state(shop, "warning")
        async with httpx.AsyncClient(verify=False, base_url=proxy.address) as program:
            told = await program.get("/billing/api/v1/parked", headers={"Authorization": f"Bearer {token}"})
            stranger = await program.get("/shop/api/v1/parked")
            page = await program.get("/shop/jobs")

        names = {str(cookie["name"]) for cookie in await context.cookies()}

    assert len(told.json()["rows"]) == 1
    assert (stranger.status_code, stranger.headers["WWW-Authenticate"]) == (401, 'Bearer realm="outbox relay"')
    assert page.headers["Location"] == "/shop/login?next=%2Fjobs"
    assert names == {"__Host-relay.billing", "__Host-relay.shop"}
