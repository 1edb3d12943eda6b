"""Of failures with very many event types, each list shows the largest groups, and says how many there are."""

from pathlib import Path

import httpx
import psycopg
import pytest

from tests.cli.command import Command
from tests.console.groups import GROUP

MANY = 20_000
PARK = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, parked_at, last_error)
    SELECT 'order', 'Type' || n, '{}', 'parked', now(), 'refused'
    FROM generate_series(1, %(many)s) AS n, generate_series(1, CASE WHEN n = %(many)s THEN 3 ELSE 1 END)
"""
LARGEST = f"Type{MANY}"  # three messages
A_SMALL_ONE = "SELECT id FROM outbox.failure WHERE event_type = 'Type7'"


@pytest.fixture(autouse=True)
def small_group(database_url: str) -> str:
    """Park rows of many event types; return the id of a group that no list shows."""
    with psycopg.connect(database_url) as connection:
        connection.execute(PARK, {"many": MANY})
        (group,) = connection.execute(A_SMALL_ONE).fetchone() or ("",)
    return str(group)


async def test_the_largest_hundred_are_shown_and_a_cause_folds_its_event_types(
    client: httpx.AsyncClient, small_group: str
) -> None:
    found = (await client.get("/api/v1/failures")).json()
    more = (await client.get("/api/v1/failures", params={"limit": 7})).json()
    named = (await client.get("/api/v1/failures", params={"group": small_group})).json()
    page = await client.get("/failures")
    unfolded = await client.get("/failures", params={"under": small_group})
    of_group = await client.get(f"/failures/{small_group}")

    assert (len(found["groups"]), found["total"], found["groups"][0]["event_type"]) == (100, MANY, LARGEST)
    assert (len(more["groups"]), more["total"]) == (7, MANY)
    assert ([each["id"] for each in named["groups"]], named["total"]) == ([small_group], 1)
    assert (GROUP.findall(page.text), page.text.count("under=")) == ([], 1)
    assert "20,000 event types" in page.text
    assert f"{MANY + 2:,}" in page.text  # messages of all its types
    assert len(GROUP.findall(unfolded.text)) == 100
    assert "The first 100 of 20,000 groups" in unfolded.text
    assert len(unfolded.text) < 200_000
    assert "Type7" in of_group.text


def test_commands_list_the_largest_hundred_and_show_any(database_url: str, tmp_path: Path, small_group: str) -> None:
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url)

    listed = relay("failures", "list")
    all_of_them = relay("failures", "list", "--limit", str(MANY))
    shown = relay("failures", "show", small_group)

    assert listed.out.count("\n") == 101  # with the names of the columns
    assert LARGEST in listed.out.splitlines()[1]
    assert listed.err == f"{MANY - 100} smaller groups more: --limit {MANY} lists them all\n"
    assert (all_of_them.out.count("\n"), all_of_them.err) == (MANY + 1, "")
    assert "Type7" in shown.out
