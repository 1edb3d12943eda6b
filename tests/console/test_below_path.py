"""Below a path, each link, form, redirect, cookie and stream of the console stays below it."""

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from relay.config.settings import Authentication, ConsoleSettings, Settings
from relay.console import templates
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.site import PASSWORD, browser, running, users

HOST = "https://relay.test"
BASE = "/ops/billing"
ADDRESS = re.compile(r'(?<![\w-])(?:href|src|action|formaction|hx-get)="([^"]+)"')
LITERAL = re.compile(r"""(?:href|src|action|url|hx-\w+)=["']?(?!\{\{ base \}\}|#)[^"'\s>]+""")


def test_each_address_in_a_template_begins_with_the_base() -> None:
    found = [
        (file.name, hit[0]) for file in templates.FOLDER.glob("*.html") for hit in LITERAL.finditer(file.read_text())
    ]
    allowed = ("hx-trigger=", "hx-select=", "hx-swap=")

    assert [each for each in found if not each[1].startswith(allowed)] == []


@pytest.mark.parametrize("is_kept", [True, False], ids=["the proxy leaves the path", "the proxy takes the path away"])
async def test_every_page_and_each_of_its_addresses_stays_below(
    settings: Settings, tmp_path: Path, database_url: str, is_kept: bool
) -> None:
    async with running(settings, origin=HOST + BASE, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, is_kept=is_kept)
        seen = [f"{BASE}/", f"{BASE}/reconcile?since=1d", *(BASE + path for path in fill(database_url))]
        posts = set()
        for path in seen:  # it grows
            answer = await client.get(at(path, is_kept=is_kept))
            assert answer.status_code == 200, path
            for address in map(unescape, ADDRESS.findall(answer.text)):
                assert address.startswith((f"{BASE}/", "#")), (path, address)
            posts |= {*re.findall(r'(?:form)?action="([^"]+)"', answer.text)}
            links = map(unescape, re.findall(r'<(?:a|link|script|img)\b[^>]*\b(?:href|src)="([^"#]+)"', answer.text))
            seen += [link for link in dict.fromkeys(links) if link not in seen]

    assert 50 < len(seen) < 300
    assert f"{BASE}/logout" in posts


async def test_a_change_is_led_back_below_the_path_and_other_origins_are_refused(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    async with running(settings, origin=HOST + BASE, **users(tmp_path)) as app, browser(app) as client:
        begun = await client.get(f"{BASE}/nodes", headers={"Accept": "text/html"})
        entered = await log_in(client)
        paused = await post(client, f"{BASE}/routes/lanes/pause", {"lane": "7", "why": "a test"})
        refused = await client.post(
            f"{BASE}/routes/lanes/pause", data={"lane": "8", "why": "a test"}, headers={"Origin": HOST + BASE}
        )
        left = await post(client, f"{BASE}/logout", {})

    assert begun.headers["Location"] == f"{BASE}/login?next=%2Fnodes"
    assert (entered.status_code, entered.headers["Location"]) == (303, f"{BASE}/nodes")
    assert paused.headers["Location"] == f"{BASE}/routes#pauses"
    assert refused.status_code == 403
    assert left.headers["Location"] == f"{BASE}/login"


async def test_two_consoles_of_one_host_have_two_cookies(settings: Settings, tmp_path: Path) -> None:
    names = set()
    for base in ("", "/billing", "/shop"):
        async with running(settings, origin=HOST + base, **users(tmp_path)) as app, browser(app) as client:
            cookie = (await client.get(f"{base}/login")).headers["Set-Cookie"]
            names.add(cookie.partition("=")[0])
            assert "Path=/;" in cookie

    assert names == {"__Host-relay", "__Host-relay.billing", "__Host-relay.shop"}


async def test_the_start_and_the_provider_lead_below_the_path(settings: Settings) -> None:
    oidc = {"authentication": Authentication.OIDC, "oidc_issuer": "https://login.test", "oidc_client_id": "relay"}
    async with running(settings, origin=HOST + BASE) as app:
        start = app.state.site.access.start
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
            entered = await client.get(start.address(HOST + BASE))
            page = await client.get(entered.headers["Location"])
    async with running(settings, origin=HOST + BASE, **oidc, owner_groups="sre") as app, browser(app) as client:
        login = await client.get(f"{BASE}/login")
        back = app.state.site.access.provider._redirect_uri

    assert entered.headers["Location"] == f"{BASE}/"
    assert page.status_code == 200
    assert f'href="{BASE}/login/provider?next=/"' in login.text
    assert back == f"{HOST}{BASE}/login/callback"


async def test_a_link_of_another_site_is_led_below_the_path(settings: Settings, tmp_path: Path) -> None:
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with running(settings, origin=HOST + BASE, **users(tmp_path)) as app, browser(app) as client:
        page = await client.get(f"{BASE}/messages?a=1", headers=visit)
        live = await client.get(f"{BASE}/live", headers=visit)

    assert f"0; url={BASE}/messages?a=1" in page.text
    assert live.status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["https://relay.test/", "https://relay.test/a//b", "https://relay.test/a/", "https://relay.test/a?b",
     "https://relay.test/..", "https://relay.test/a/../b", 'https://relay.test/"', "https://relay.test/%2e"],
)  # fmt: skip
def test_a_path_that_a_browser_writes_in_another_way_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError):
        ConsoleSettings(origin=origin)


@pytest.mark.parametrize(
    ("origin", "base"), [("", ""), ("https://a.test:1", ""), ("https://a.test/b.c/d-e", "/b.c/d-e")]
)
def test_the_base_is_the_path_of_the_origin(origin: str, base: str) -> None:
    assert ConsoleSettings(origin=origin).base == base


def at(path: str, *, is_kept: bool) -> str:
    return path if is_kept else path.removeprefix(BASE)


async def log_in(client: httpx.AsyncClient, *, is_kept: bool = True) -> httpx.Response:
    path = at(f"{BASE}/login", is_kept=is_kept)
    await client.get(path)
    return await post(client, path, {"name": Role.OWNER, "password": PASSWORD, "next": "/nodes"})


async def post(client: httpx.AsyncClient, path: str, form: Mapping[str, str]) -> httpx.Response:
    return await client.post(path, data=dict(form), headers={"Origin": HOST})
