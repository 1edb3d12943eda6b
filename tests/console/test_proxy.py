"""Authentication by the headers of a proxy."""

from typing import Any

import pytest

from relay.config.settings import Settings
from tests.console.site import browser, running

PROXY: dict[str, Any] = {
    "authentication": "proxy",
    "trusted_proxies": "10.0.0.1, 2001:db8::/32",
    "viewer_groups": "staff",
    "owner_groups": "sre, dba",
}


@pytest.mark.parametrize("address", ["10.0.0.1", "2001:db8::7"])
async def test_a_trusted_proxy_says_who_the_user_is(settings: Settings, address: str) -> None:
    async with running(settings, **PROXY) as app, browser(app, address=address) as client:
        page = await client.get("/", headers={"X-Forwarded-User": "ada", "X-Forwarded-Groups": "staff,sre"})

    assert page.status_code == 200
    assert "ada" in page.text
    assert "owner" in page.text


async def test_another_address_cannot_say_who_it_is(settings: Settings) -> None:
    async with running(settings, **PROXY) as app, browser(app, address="10.0.0.2") as client:
        page = await client.get("/", headers={"X-Forwarded-User": "ada", "X-Forwarded-Groups": "sre"})

    assert page.status_code == 403
    assert "10.0.0.2 is no trusted proxy" in page.text


@pytest.mark.parametrize("groups", ["", "strangers", "sre2", "SRE"])
async def test_a_user_without_a_group_has_no_role(settings: Settings, groups: str) -> None:
    async with running(settings, **PROXY) as app, browser(app, address="10.0.0.1") as client:
        page = await client.get("/", headers={"X-Forwarded-User": "ada", "X-Forwarded-Groups": groups})

    assert page.status_code == 403
    assert "no group of ada has a role" in page.text


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-Forwarded-Groups", "sre")],
        [("X-Forwarded-User", "ada"), ("X-Forwarded-User", "eve"), ("X-Forwarded-Groups", "sre")],
        [("X-Forwarded-User", "ada"), ("X-Forwarded-Groups", "sre"), ("X-Forwarded-Groups", "dba")],
    ],
    ids=["none", "no name", "two names", "groups twice"],
)
async def test_headers_that_no_proxy_has_cleaned_name_nobody(
    settings: Settings, headers: list[tuple[str, str]]
) -> None:
    async with running(settings, **PROXY) as app, browser(app, address="10.0.0.1") as client:
        page = await client.get("/", headers=headers)

    assert page.status_code == 401
