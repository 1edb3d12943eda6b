"""Login by a real OpenID Connect provider."""

import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from joserfc.errors import JoseError

from relay.config.settings import ConsoleSettings, Settings
from relay.console.access.identity import RefusedError
from relay.console.access.oidc import CALLBACK, COOKIE
from relay.console.access.oidc import Provider as KnownProvider
from tests.console.provider import CLIENT, SECRET, Provider, running_provider
from tests.console.site import ORIGIN, PASSWORD, browser, running

INPUT = re.compile(r"<input[^>]*>")
ADA = {"preferred_username": "ada"}
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with running_provider(ORIGIN + CALLBACK) as provider:
        yield provider


@pytest.fixture
async def app(settings: Settings, provider: Provider) -> AsyncIterator[FastAPI]:
    async with running(settings, **oidc(provider)) as app:
        yield app


def oidc(provider: Provider) -> dict[str, Any]:
    return {
        "authentication": "oidc",
        "oidc_issuer": provider.issuer,
        "oidc_client_id": CLIENT,
        "oidc_client_secret": SECRET,
        "viewer_groups": "relay-viewers",
        "operator_groups": "relay-operators",
        "owner_groups": "relay-owners",
    }


async def sent_back(console: httpx.AsyncClient, name: str, *, to: str = "/") -> str:
    """Log in at the provider; return where it sends the browser."""
    begun = await console.get("/login/provider", params={"next": to})
    assert begun.status_code == 303, begun.text
    async with httpx.AsyncClient(follow_redirects=False) as client:
        answer = await client.get(begun.headers["Location"])
        for _ in range(10):
            if answer.is_redirect:
                place = str(answer.url.join(answer.headers["Location"]))
                if place.startswith(ORIGIN):
                    return place
                answer = await client.get(place)
            else:
                fields = [dict(ATTRIBUTE.findall(found)) for found in INPUT.findall(answer.text)]
                form = {each["name"]: unescape(each.get("value", "")) for each in fields if "name" in each}
                typed = {"login": name, "password": PASSWORD, "answer": "accept"}
                answer = await client.post(answer.url, data={**form, **typed})
    raise AssertionError(f"the provider sends nobody back: {answer.status_code} {answer.text}")


def inside(address: str) -> str:
    return address.removeprefix(ORIGIN)


@pytest.mark.parametrize(("name", "role"), [("ada", "owner"), ("grace", "operator"), ("alan", "viewer")])
async def test_the_provider_says_who_the_user_is_and_the_group_which_role(app: FastAPI, name: str, role: str) -> None:
    async with browser(app) as client:
        landed = await client.get(inside(await sent_back(client, name, to="/?a=1")))
        page = await client.get("/")

    assert landed.status_code == 200, landed.text  # a redirect would come without the session's cookie
    assert "url=/?a=1" in landed.text
    assert "SameSite=strict" in landed.headers["Set-Cookie"]
    assert page.status_code == 200
    assert name in page.text
    assert role in page.text


async def test_a_user_without_a_group_is_refused(app: FastAPI) -> None:
    async with browser(app) as client:
        landed = await client.get(inside(await sent_back(client, "eve")))
        page = await client.get("/")

    assert landed.status_code == 403
    assert "no group of eve has a role" in landed.text
    assert page.status_code == 303


async def test_the_login_proves_that_it_is_the_one_that_was_begun(app: FastAPI) -> None:
    async with browser(app) as client:
        begun = await client.get("/login/provider")

    asked = parse_qs(urlsplit(begun.headers["Location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert {"state", "nonce", "code_challenge"} <= asked.keys()
    assert begun.headers["Set-Cookie"].startswith(COOKIE)
    assert "SameSite=lax" in begun.headers["Set-Cookie"]


async def test_an_answer_to_another_browser_logs_nobody_in(app: FastAPI) -> None:
    async with browser(app) as attacker, browser(app) as victim:
        answer = inside(await sent_back(attacker, "ada"))
        without = await victim.get(answer)
        await victim.get("/login/provider")
        other = await victim.get(answer)
        finished = await attacker.get(answer)

    assert finished.status_code == 200
    assert (without.status_code, other.status_code) == (403, 403)
    assert "__Host-relay=" not in str(other.headers)


async def test_a_code_counts_once(app: FastAPI) -> None:
    async with browser(app) as client:
        answer = inside(await sent_back(client, "ada"))
        cookie = client.cookies[COOKIE]
        first = await client.get(answer)
        client.cookies.set(COOKIE, cookie, domain="relay.test")
        again = await client.get(answer)

    assert first.status_code == 200
    assert again.status_code == 502
    assert "the provider did not log you in" in again.text


async def test_a_code_of_another_login_is_refused_by_its_verifier(app: FastAPI) -> None:
    async with browser(app) as client, browser(app) as other:
        answer = inside(await sent_back(other, "ada"))
        code = parse_qs(urlsplit(answer).query)["code"][0]
        begun = await client.get("/login/provider")
        state = parse_qs(urlsplit(begun.headers["Location"]).query)["state"][0]
        refused = await client.get(CALLBACK, params={"code": code, "state": state})
        finished = await other.get(answer)

    assert finished.status_code == 200
    assert refused.status_code == 502


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"oidc_client_secret": "wrong"}, "did not log you in"),
        ({"oidc_issuer": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
async def test_a_provider_that_refuses_is_told(
    settings: Settings, provider: Provider, change: dict[str, str], words: str
) -> None:
    async with running(settings, **{**oidc(provider), **change}) as app, browser(app) as client:
        if "oidc_issuer" in change:
            answer = await client.get("/login/provider")
        else:
            answer = await client.get(inside(await sent_back(client, "ada")))

    assert answer.status_code == 502
    assert words in answer.text
    assert SECRET not in answer.text


def provider_of(**console: str) -> KnownProvider:
    given = {"authentication": "oidc", "oidc_issuer": "https://id.test", "oidc_client_id": "relay", "origin": ORIGIN}
    return KnownProvider(ConsoleSettings.model_validate({**given, "owner_groups": "sre", **console}))


@pytest.mark.parametrize("groups", [{"sre": False}, [{"sre": 1}], 7, ["sre", None]], ids=str)
def test_groups_that_are_no_names_are_refused(groups: object) -> None:
    with pytest.raises(RefusedError, match="its claim groups is no list of names"):
        provider_of()._identity({"sub": "1", "groups": groups})


@pytest.mark.parametrize("groups", [None, [], "", ["SRE"]], ids=str)
def test_a_user_without_a_group_of_a_role_is_refused(groups: object) -> None:
    with pytest.raises(RefusedError, match="no group of ada"):
        provider_of()._identity({"sub": "1", "preferred_username": "ada", "groups": groups})


def test_the_audit_names_what_a_user_cannot_change() -> None:
    provider = provider_of()

    named = [provider._identity({"groups": "sre", **claims}).name for claims in ({"sub": "f3"}, {"sub": "f3", **ADA})]

    assert named == ["f3", "ada (f3)"]


@pytest.mark.parametrize(
    ("claims", "is_right"),
    [
        ({"aud": "relay"}, True),
        ({"aud": ["relay"], "azp": "relay"}, True),
        ({"aud": "relay", "azp": "other"}, False),
        ({"aud": ["relay", "other"]}, False),
        ({"aud": ["relay", "other"], "azp": "relay"}, True),
    ],
)
def test_a_token_is_for_this_client(claims: dict[str, Any], is_right: bool) -> None:
    now = int(time.time())
    token = {"iss": "https://id.test", "sub": "1", "exp": now + 60, "iat": now, "nonce": "n", **claims}

    with nullcontext() if is_right else pytest.raises(JoseError):
        provider_of()._check(token, "n")
