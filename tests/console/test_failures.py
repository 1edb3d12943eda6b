"""A whole failure group is repaired in a page: retried in stages, archived or discarded, as a job."""

from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.groups import group_page
from tests.console.rows import parked
from tests.console.site import browser, log_in, post, running, users
from tests.operate.rows import Rows
from tests.support.eventually import eventually


async def test_a_group_is_retried_in_stages(settings: Settings, tmp_path: Path, database_url: str) -> None:
    rows = [parked(database_url, "the broker says no") for _ in range(3)]
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        path, page = await group_page(client)

        form = {"kind": "retry", "why": "mended", "staged": "true"}
        ordered = await post(client, f"{path}/jobs", form)
        job = await client.get(ordered.headers["Location"])

        assert ordered.status_code == 303
        assert all(f"/messages/{row}" in page.text for row in rows)
        assert "1, 10, 100; pauses above 5 %" in job.text
        assert "mended" in job.text
        cancelled = await post(client, f"{ordered.headers['Location']}/cancel", {"why": "enough"})
        assert "by operator: enough" in (await client.get(cancelled.headers["Location"])).text
        assert "cancelled" in (await client.get("/jobs")).text


@pytest.mark.parametrize("chosen", ["ticked", "by a key"])
async def test_a_part_of_a_group_is_retried(settings: Settings, tmp_path: Path, database_url: str, chosen: str) -> None:
    rows = Rows(database_url)
    with rows.connection:
        first, second, _ = (rows.parked(key, aggregate_type="order") for key in ("7", "7", "8"))
        async with running(settings, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.OPERATOR)
            path, _ = await group_page(client)
            form = {"kind": "retry", "part": "true"}
            nothing = await post(client, f"{path}/jobs", form)
            all_and_some = await post(client, f"{path}/jobs", {**form, "part": "false", "id": str(first)})
            no_id = await post(client, f"{path}/jobs", {**form, "id": "seven"})
            part = {"id": [str(first), str(second)]} if chosen == "ticked" else {"type": "order", "key": "7"}
            ordered = await post(client, f"{path}/jobs", {**form, **part})
            await eventually(
                lambda: [state for state, _ in rows.states().values()] == ["pending", "pending", "parked"],
                "the part is retried",
            )

    assert [each.status_code for each in (nothing, all_and_some, no_id, ordered)] == [422, 422, 422, 303]


async def test_a_group_is_archived_by_an_operator_and_discarded_by_an_owner(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    row = parked(database_url, "the broker says no")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        path, page = await group_page(client)
        no_reason = await post(client, f"{path}/jobs", {"kind": "archive", "why": " "})
        refused = await post(client, f"{path}/discard", {"why": "test"})
        await log_in(client, Role.OWNER)
        nonsense = await post(client, f"{path}/jobs", {"kind": "replay", "why": "test"})
        await post(client, f"{path}/discard", {"why": "test"})

        with Rows(database_url).connection as connection:
            await eventually(
                lambda: (
                    connection.execute("SELECT state FROM outbox.message WHERE id = %s", [row]).fetchone()
                    == ("discarded",)
                ),
                "the job has discarded it",
            )
        assert [each.status_code for each in (no_reason, refused, nonsense)] == [422, 403, 422]
        assert "Discard all" not in page.text
        assert "Nothing has failed" in (await client.get("/failures")).text


async def test_a_route_is_tried_by_a_button(settings: Settings, tmp_path: Path, database_url: str) -> None:
    rows = Rows(database_url)
    with rows.connection:
        rows.quarantined("nowhere")
        async with running(settings, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.OPERATOR)
            path, page = await group_page(client)

            tried = await post(client, f"{path}/probe", {})
            rows.connection.execute("DELETE FROM outbox.message")
            rows.connection.execute("DELETE FROM outbox.quarantine")
            works_already = await post(client, f"{path}/probe", {})

    assert (tried.status_code, works_already.status_code) == (303, 303)
    assert "Try now" in page.text
    assert "nowhere" in page.text
