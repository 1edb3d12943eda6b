"""Dead letters are listed, shown, saved, sent back and thrown away by the API."""

import orjson

from relay.console.access.identity import Role
from tests.console.api.program import Program
from tests.consume.conftest import client, inbox, queue, table
from tests.dead_letters.conftest import audit, letters
from tests.dead_letters.letters import Letters

__all__ = ["audit", "client", "inbox", "letters", "queue", "table"]  # fixtures


async def test_letters_are_listed_and_shown(program: Program, letters: Letters) -> None:
    ids = await letters.put_all(3)
    name = letters.queue.name

    listed = (await program.get("/dead-letters", queue=name, limit=2)).json()
    shown = await program.get("/dead-letters/letter", queue=name, message_id=ids[1])
    hidden = await program.as_(Role.VIEWER).get("/dead-letters/letter", queue=name, message_id=ids[1])
    saved = (await program.get("/dead-letters/export", queue=name)).text

    assert [each["message_id"] for each in listed["letters"]] == ids[:2]
    assert (listed["messages"], listed["matched"]) == (3, 2)
    assert (shown.json()["message_id"], hidden.status_code) == (ids[1], 403)
    assert [orjson.loads(line)["message_id"] for line in saved.splitlines()] == ids


async def test_letters_are_sent_back_once(program: Program, letters: Letters) -> None:
    ids = await letters.put_all(2)
    body = {"queue": letters.queue.name, "message_ids": ids[:1], "why": "fixed"}

    first = await program.post("/dead-letters/retry", body, key="one")
    again = await program.post("/dead-letters/retry", body, key="one")
    thrown = await program.post("/dead-letters/discard", {"queue": letters.queue.name, "all": True, "why": "old"})

    assert first.json() == again.json()
    assert (first.json()["done"], thrown.json()["done"]) == (1, 1)
    assert await letters.waiting() == 0
