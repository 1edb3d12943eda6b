"""Login by the password file."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from relay.console.access import login_limit
from relay.console.access.identity import Identity
from relay.console.access.passwords import PasswordFile
from relay.console.pages import login
from relay.errors import ConfigurationError, NotFoundError, UsageError
from relay.operate.operation import Role
from tests.console.site import PASSWORD, browser, log_in, post, running, users


async def test_a_stranger_is_sent_to_the_login_and_then_to_the_page(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        asked = await client.get("/?x=1")
        done = await log_in(client, Role.VIEWER, to="/?x=1")
        page = await client.get("/")

    assert (asked.status_code, asked.headers["Location"]) == (303, "/login?next=%2F%3Fx%3D1")
    assert (done.status_code, done.headers["Location"]) == (303, "/?x=1")
    assert page.status_code == 200


async def test_the_session_has_a_cookie_that_no_script_and_no_other_site_gets(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        done = await log_in(client, Role.VIEWER)

    (cookie,) = done.headers.get_list("Set-Cookie")
    assert cookie.startswith("__Host-relay=")
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Secure"} == set(cookie.split("; ")[1:])


async def test_a_login_has_a_new_cookie_and_the_logout_ends_it(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        await client.get("/login")
        planted = client.cookies["__Host-relay"]
        await post(client, "/login", {"name": "viewer", "password": PASSWORD})
        held = client.cookies["__Host-relay"]
        page = await client.get("/")
        await post(client, "/logout", {})
        client.cookies.set("__Host-relay", held, domain="relay.test")
        after = await client.get("/")

    assert held != planted
    assert page.status_code == 200
    assert after.status_code == 303


@pytest.mark.parametrize("name", ["viewer", "nobody", "", "a:b", "\u0000"], ids=ascii)
async def test_a_wrong_name_or_password_lets_nobody_in(guarded: FastAPI, name: str) -> None:
    async with browser(guarded) as client:
        refused = await log_in(client, name, "wrong")
        page = await client.get("/")

    assert refused.status_code in (403, 422)
    assert page.status_code == 303


@pytest.mark.parametrize("path", ["//evil.test", "https://evil.test", "/\\evil.test", "javascript:1", "/\n/x"])
async def test_a_login_leads_to_no_other_site(guarded: FastAPI, path: str) -> None:
    async with browser(guarded) as client:
        done = await log_in(client, Role.VIEWER, to=path)

    assert done.headers["Location"] == "/"


async def test_a_name_is_locked_after_some_failures_from_one_network(guarded: FastAPI) -> None:
    for number in range(login_limit.MOST_BY_NAME):
        async with browser(guarded, address=f"2001:db8::{number}") as client:
            assert (await log_in(client, "viewer", "wrong")).status_code == 403

    async with browser(guarded, address="2001:db8::1:1") as client:
        locked = await log_in(client, "viewer")
        other = await log_in(client, "owner")

    assert locked.status_code == 429
    assert "try again in" in locked.text
    assert other.status_code == 303


async def test_strangers_lock_nobody_out_where_he_has_logged_in_before(
    guarded: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_limit, "MOST_BY_STRANGERS", 5)
    async with browser(guarded, address="192.0.2.1") as client:
        assert (await log_in(client, "owner")).status_code == 303
    for number in range(login_limit.MOST_BY_STRANGERS):
        async with browser(guarded, address=f"10.0.0.{number}") as client:
            assert (await log_in(client, "owner", "wrong")).status_code == 403

    async with browser(guarded, address="192.0.2.1") as client:
        known = await log_in(client, "owner")
    async with browser(guarded, address="192.0.2.2") as client:
        stranger = await log_in(client, "owner")

    assert (known.status_code, stranger.status_code) == (303, 429)


async def test_many_logins_at_once_do_not_wait_for_each_other_without_end(
    guarded: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "MOST_WAITING", 2)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(browser(guarded, address=f"10.0.0.{number}")) for number in range(12)
        ]
        answers = await asyncio.gather(*(log_in(client, "owner", "wrong") for client in clients))

    assert {answer.status_code for answer in answers} == {403, 503}


async def test_an_address_is_locked_after_some_failures_of_any_name(guarded: FastAPI) -> None:
    async with browser(guarded, address="10.0.0.1") as client:
        for number in range(login_limit.MOST_BY_NETWORK):
            assert (await log_in(client, f"name-{number}", "wrong")).status_code == 403
        locked = await log_in(client, "owner")

    assert locked.status_code == 429


async def test_a_user_who_is_removed_is_out_at_once(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        before = await client.get("/")
        PasswordFile(tmp_path / "users").remove("owner")
        after = await client.get("/")

    assert (before.status_code, after.status_code) == (200, 303)


async def test_a_session_ends_in_time(tmp_path: Path) -> None:
    settings = Settings(database=DatabaseSettings(url=SecretStr("postgresql://localhost:1/none")))
    async with running(settings, session_timeout=1e-6, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)

        assert (await client.get("/")).status_code == 303


def test_a_file_keeps_its_users_and_shows_no_password(tmp_path: Path) -> None:
    file = PasswordFile(tmp_path / "users")
    file.put("ada", Role.VIEWER, PASSWORD)
    file.put("alan@example.org", Role.OPERATOR, PASSWORD)
    file.put("ada", Role.OWNER, PASSWORD)

    assert file.users() == [Identity("alan@example.org", Role.OPERATOR), Identity("ada", Role.OWNER)]
    assert PASSWORD not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_a_user_is_refused(tmp_path: Path) -> None:
    file = PasswordFile(tmp_path / "users")
    with pytest.raises(UsageError, match="a name has"):
        file.put("a:owner", Role.VIEWER, PASSWORD)
    with pytest.raises(UsageError, match="shorter than 12"):
        file.put("ada", Role.VIEWER, "short")
    file.put("ada", Role.VIEWER, PASSWORD)
    with pytest.raises(NotFoundError, match="no user alan"):
        file.remove("alan")


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("")
    (tmp_path / "users").chmod(0o666)

    with pytest.raises(ConfigurationError, match="every user of this host may write it"):
        PasswordFile(tmp_path / "users").lines()


@pytest.mark.parametrize("line", ["ada", "ada:admin:$argon2id$x", "ada:owner:plain"])
def test_a_line_that_is_no_user_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "users").write_text(f"{line}\n")

    with pytest.raises(ConfigurationError, match="line 1 is not name:role:hash"):
        PasswordFile(tmp_path / "users").lines()


async def test_the_address_of_a_client_is_what_a_trusted_proxy_tells(settings: Settings, tmp_path: Path) -> None:
    limits = {"trusted_proxies": "10.0.0.0/8", **users(tmp_path)}
    async with running(settings, **limits) as app, browser(app, address="10.0.0.1") as client:
        for number in range(login_limit.MOST_BY_NETWORK):
            client.headers["X-Forwarded-For"] = f"6.6.6.{number}, 192.0.2.1"  # the first is the client's own claim
            await log_in(client, f"name-{number}", "wrong")
        locked = await log_in(client, "owner")
        client.headers["X-Forwarded-For"] = "192.0.2.2"
        other = await log_in(client, "owner")

    assert (locked.status_code, other.status_code) == (429, 303)
