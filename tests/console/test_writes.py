"""A request that changes something is refused, unless a page of the console has sent it for a user who may.

The routes are those of the app, so that no route can be forgotten.
"""

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.routes import role_of, routes, writes
from tests.console.site import ORIGIN, browser, log_in, running, users

FROM_OURS = {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}
OPEN = {"/login", "/logout", "/login/provider", "/login/callback", "/icon/{mood}.svg"}


def test_each_route_but_the_login_names_a_role(guarded: FastAPI) -> None:
    assert [route.path for route in routes(guarded) if role_of(route) is None and route.path not in OPEN] == []
    assert {"/", "/login", "/logout"} <= {route.path for route in routes(guarded)}


def test_each_route_that_changes_something_takes_an_operator(guarded: FastAPI) -> None:
    changing = {(path, role) for _, path, role in writes(guarded) if path not in OPEN}

    assert {path for path, role in changing if role is None or not role.includes(Role.OPERATOR)} == set()
    assert {"/messages/1/reveal", "/retention", "/api/v1/parked/retry"} <= {path for path, _ in changing}


def test_nothing_but_the_static_files_stands_beyond_these_checks(guarded: FastAPI) -> None:
    others = [each for each in iter_route_contexts(guarded.routes) if not isinstance(each.original_route, APIRoute)]

    assert [each.path for each in others] == ["/static"]


async def test_without_a_session_nothing_can_be_changed(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        await client.get("/login")  # a browser without a session has a cookie, too
        for method, path, role in writes(guarded):
            if role is not None:
                assert (await client.request(method, path, headers=FROM_OURS)).status_code == 401, path


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "https://evil.test"}, {"Origin": "null"}, FROM_OURS | {"Sec-Fetch-Site": "none"}],
    ids=str,
)
async def test_from_another_site_nothing_can_be_changed(guarded: FastAPI, headers: dict[str, str]) -> None:
    async with browser(guarded) as client:
        await log_in(client, Role.OWNER)
        for method, path, _ in writes(guarded):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 403, path
            assert "does not come from a page" in answer.text, path


async def test_without_a_cookie_of_ours_nothing_can_be_changed(settings: Settings) -> None:
    proxy = {"authentication": "proxy", "trusted_proxies": "127.0.0.1", "owner_groups": "sre"}
    named = {"X-Forwarded-User": "ada", "X-Forwarded-Groups": "sre"}
    async with running(settings, **proxy) as app, browser(app) as client:
        for method, path, _ in writes(app):
            client.cookies.clear()
            answer = await client.request(method, path, headers=FROM_OURS | named)
            assert answer.status_code == 403, path
            assert "out of date" in answer.text, path


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_changes_no_more_than_it_may(guarded: FastAPI, role: Role) -> None:
    async with browser(guarded) as client:
        await log_in(client, role)
        for method, path, least in writes(guarded):
            if least is not None and not role.includes(least):
                answer = await client.request(method, path, headers=FROM_OURS)
                assert answer.status_code == 403, path
                assert f"{role} is {role}" in answer.text, path


async def test_a_read_only_console_changes_nothing(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, read_only=True, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        for method, path, role in writes(app):
            if role is not None:
                answer = await client.request(method, path, headers=FROM_OURS)
                assert answer.status_code == 403, path
                assert "read-only" in answer.text, path
