"""What stands before every page."""

import httpx
import pytest
from fastapi import FastAPI

from tests.console.site import browser

VISIT = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize("path", ["/", "/login", "/nowhere", "/static/console.css", "/api/v1/nowhere"])
async def test_each_answer_forbids_scripts_of_others_and_frames(guarded: FastAPI, path: str) -> None:
    async with browser(guarded) as client:
        answer = await client.get(path)

    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "same-origin"


async def test_pages_are_kept_in_no_cache(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).headers["Cache-Control"] == "no-store"


async def test_another_name_that_leads_here_is_not_answered(guarded: FastAPI) -> None:
    async with browser(guarded, origin="https://evil.test") as client:
        answer = await client.get("/login")

    assert answer.status_code == 421


async def test_from_another_site_a_browser_is_led_to_ask_again_with_its_cookie(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        answer = await client.get("/?a=1&b=2", headers=VISIT)

    assert answer.status_code == 200
    assert "0; url=/?a=1&amp;b=2" in answer.text
    assert "Set-Cookie" not in answer.headers  # it would take the place of the session's


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {**VISIT, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}),
        ("/", {**VISIT, "Sec-Fetch-Dest": "iframe"}),
        ("/api/v1/reconcile?since=2h", VISIT),
        ("/live", VISIT),
        ("/messages", {**VISIT, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}),
    ],
)
async def test_a_page_of_another_site_asks_for_nothing(
    client: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    """A proxy in front of the console may let in whatever the user's browser sends."""
    assert (await client.get(path, headers=headers)).status_code == 403


async def test_an_error_of_the_api_is_a_problem_document(guarded: FastAPI) -> None:
    async with browser(guarded) as client:
        answer = await client.get("/api/v1/nowhere")

    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["status"] == 404
