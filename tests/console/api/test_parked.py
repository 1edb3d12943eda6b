"""Parked rows are listed page by page, shown, sent again and given up by the API."""

from relay.operate.operation import Role
from tests.console.api.program import Program
from tests.operate.rows import Rows


async def test_pages_hold_each_row_once_while_rows_come_and_go(program: Program, rows: Rows) -> None:
    written = [rows.parked(str(number)) for number in range(5)]

    first = (await program.get("/parked", limit=2)).json()
    rows.connection.execute("UPDATE outbox.message SET state = 'pending' WHERE id = %s", [written[0]])
    added = rows.parked("later")
    second = (await program.get("/parked", limit=2, cursor=first["next"])).json()
    third = (await program.get("/parked", limit=2, cursor=second["next"])).json()

    listed = [row["id"] for page in (first, second, third) for row in page["rows"]]
    assert listed == [*written, added]
    assert (first["total"], second["total"]) == (5, 5)


async def test_a_cursor_of_another_list_is_refused(program: Program, rows: Rows) -> None:
    rows.parked("1")
    cursor = (await program.get("/parked", limit=1)).json()["next"]

    answers = [await program.get(path, cursor=cursor) for path in ("/jobs", "/parked")]
    nonsense = await program.get("/parked", cursor="nonsense")

    assert [answer.status_code for answer in (*answers, nonsense)] == [422, 200, 422]


async def test_filters_select(program: Program, rows: Rows) -> None:
    wanted = rows.parked("2", aggregate_type="order", event_type="Paid")
    rows.parked("1")

    for name, value in (("aggregate_type", "order"), ("aggregate_id", "2"), ("event_type", "Paid"), ("ids", wanted)):
        page = (await program.get("/parked", **{name: value})).json()
        assert [row["id"] for row in page["rows"]] == [wanted], name


async def test_a_payload_is_shown_to_an_operator_and_to_no_viewer(program: Program, rows: Rows) -> None:
    row = rows.parked(payload=None, payload_bytes=b"\x00\xff")

    shown = await program.as_(Role.OPERATOR).post(f"/parked/{row}/reveal", {"why": "a call"})
    refused = await program.as_(Role.VIEWER).post(f"/parked/{row}/reveal", {})

    assert shown.json()["payload_bytes"] == "AP8="
    assert refused.status_code == 403
    audit = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("message reveal", str(row), "program-operator", "a call")]


async def test_a_row_that_is_not_parked_is_not_found(program: Program, rows: Rows) -> None:
    row = rows.pending()

    answer = await program.post(f"/parked/{row}/reveal", {})

    assert (answer.status_code, answer.headers["Content-Type"]) == (404, "application/problem+json")
    assert answer.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": f"{row} is not parked: it is pending",
    }


async def test_a_retry_is_ordered_once_however_often_it_is_asked_for(program: Program, rows: Rows) -> None:
    head = rows.parked()
    rows.parked(behind=head)
    preview = (await program.get("/parked/preview", ids=head)).json()

    first = await program.post("/parked/retry", {"ids": [str(head)], "why": "fixed"}, key="one")
    job = await program.job(first)
    rows.connection.execute("UPDATE outbox.message SET state = 'parked' WHERE id = %s", [head])
    again = await program.post("/parked/retry", {"ids": [str(head)], "why": "fixed"}, key="one")

    assert first.status_code == again.status_code == 202
    assert first.json() == again.json()
    assert (preview["chosen"], preview["released"]) == (job["done"], job["released"]) == (1, 1)
    assert rows.states()[head] == ("parked", None)
    audit = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("parked retry", str(head), "program-owner", "fixed")]


async def test_a_key_that_comes_with_another_request_is_refused(program: Program, rows: Rows) -> None:
    first, second = rows.parked("1"), rows.parked("2")
    await program.post("/parked/retry", {"ids": [str(first)]}, key="one")

    refused = await program.post("/parked/retry", {"ids": [str(second)]}, key="one")
    of_another = await program.as_(Role.OPERATOR).post("/parked/retry", {"ids": [str(second)]}, key="one")

    assert (refused.status_code, of_another.status_code) == (422, 202)
    assert "Idempotency-Key" in refused.json()["detail"]


async def test_what_failed_is_not_kept_and_can_be_asked_for_again(program: Program, rows: Rows) -> None:
    row = rows.parked()
    rows.connection.execute("ALTER TABLE outbox.job RENAME TO elsewhere")
    failed = await program.post("/parked/discard", {"ids": [str(row)], "why": "wrong"}, key="one")
    rows.connection.execute("ALTER TABLE outbox.elsewhere RENAME TO job")

    done = await program.post("/parked/discard", {"ids": [str(row)], "why": "wrong"}, key="one")

    assert (failed.status_code, done.status_code) == (503, 202)
    await program.job(done)
    assert rows.states()[row] == ("discarded", None)


async def test_a_change_says_which_rows_and_needs_a_key(program: Program) -> None:
    everything_and_a_filter = {"all": True, "event_type": "Paid", "why": "x"}
    bodies = ({"why": "x"}, everything_and_a_filter, {"all": True}, {"all": True, "why": "x", "others": 1})

    answers = [await program.post("/parked/discard", body) for body in bodies]
    keyless = await program.client.post(
        "/api/v1/parked/discard",
        json={"all": True, "why": "x"},
        headers={"Authorization": f"Bearer {program.tokens[Role.OWNER]}"},
    )

    assert [answer.status_code for answer in (*answers, keyless)] == [422] * 5


async def test_an_owner_sends_an_edited_copy_once_however_often_it_is_asked_for(program: Program, rows: Rows) -> None:
    row = rows.parked(headers='{"tenant": "acme"}')
    body = {"payload": '{"amount": 1.10}', "discard": True, "why": "a wrong amount"}

    refused = await program.as_(Role.OPERATOR).post(f"/parked/{row}/edit", body)
    broken = await program.post(f"/parked/{row}/edit", {**body, "payload": "{"})
    both = await program.post(f"/parked/{row}/edit", {**body, "payload_bytes": "AA=="})
    done = await program.post(f"/parked/{row}/edit", body, key="one")
    again = await program.post(f"/parked/{row}/edit", body, key="one")

    assert [each.status_code for each in (refused, broken, both, done)] == [403, 422, 422, 200]
    assert "payload is not JSON" in broken.json()["detail"]
    assert again.json() == done.json()
    told = done.json()
    assert rows.states() == {row: ("discarded", None), told["id"]: ("pending", None)}
    (copy,) = rows.connection.execute("SELECT headers, payload::text FROM outbox.message WHERE state = 'pending'")
    assert copy == ({"tenant": "acme", "x-edit-of": told["edit_of"]}, '{"amount": 1.10}')


async def test_a_copy_may_have_other_bytes(program: Program, rows: Rows) -> None:
    row = rows.parked(payload=None, payload_bytes=b"old")

    done = await program.post(f"/parked/{row}/edit", {"payload_bytes": "AP8=", "why": "a wrong file"})

    assert done.json()["discarded"] is False
    (copy,) = rows.connection.execute("SELECT payload_bytes FROM outbox.message WHERE state = 'pending'")
    assert copy == (b"\x00\xff",)
