"""A command that a console does prints what it prints on the servers themselves."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.cli.command import Command, Result
from tests.console.api.program import tokens
from tests.console.site import serving, users
from tests.consume.conftest import queue
from tests.consume.effects import QUEUE
from tests.dead_letters.changes import Audit
from tests.dead_letters.conftest import audit, letters
from tests.dead_letters.letters import DEAD, Letters
from tests.dead_letters.tried import consuming
from tests.operate.batches import WRITE
from tests.operate.held import held
from tests.operate.rows import Rows

__all__ = ["audit", "letters", "queue"]  # fixtures

WHY = ("--why", "fixed")
PAUSED = """
    INSERT INTO outbox.job (kind, source, made_by, filter, state, selected, by_console)
    VALUES ('retry', 'parked', 'me', '{}', 'paused', 2, %s)
"""

MANY = """
    INSERT INTO outbox.job (kind, source, made_by, filter, state, selected)
    SELECT 'retry', 'parked', 'me', '{}', 'done', 1 FROM generate_series(1, 1003)
"""


@dataclass(frozen=True, slots=True)
class Ends:
    """The command on the servers, and by a console."""

    relay: Command
    address: str
    token: str

    async def here(self, *arguments: str) -> Result:
        return await asyncio.to_thread(self.relay.process, *arguments)

    async def there(self, *arguments: str, **variables: str) -> Result:
        command = Command(self.relay.folder)
        given = {"RELAY_TOKEN": self.token, **variables}
        return await asyncio.to_thread(lambda: command.process("--server", self.address, *arguments, **given))

    async def shown_here(self, *arguments: str) -> Result:
        """Run a command that takes no signals in this process, in a tenth of the time."""
        return await asyncio.to_thread(self.relay, *arguments)


@pytest.fixture
async def ends(settings: Settings, tmp_path: Path, database_url: str, broker_url: str) -> AsyncIterator[Ends]:
    """Both, of the same servers; the console's command has a folder without relay.toml."""
    token = tokens(tmp_path)[Role.OWNER]
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)
    async with serving(settings, **users(tmp_path), tokens=str(tmp_path / "tokens")) as address:
        yield Ends(relay, address, token)


@pytest.mark.timeout(400)  # it starts the command 26 times
async def test_what_it_shows_is_the_same(ends: Ends, rows: Rows) -> None:
    head = rows.parked(payload=None, payload_bytes=b"\x00\xff", aggregate_type="order")
    rows.parked(behind=head)
    rows.quarantined("nowhere")
    rows.connection.execute(WRITE)
    commands = (
        ("status",),
        ("parked", "list"),
        ("parked", "list", "--held", "--limit", "1", "--output", "json"),
        ("parked", "list", "--aggregate-type", "order"),
        ("parked", "show", str(head)),
        ("parked", "show", str(head), "--output", "json"),
        ("parked", "show", "99"),
        ("parked", "retry", "--all", "--dry-run"),
        ("parked", "retry", str(head), "--all"),
        ("parked", "discard", "--all", "--dry-run"),
        ("failures", "list", "--held"),
        ("quarantine", "list"),
        ("quarantine", "show", "1"),
        ("quarantine", "show", "99"),
        ("quarantine", "reroute", "1", "--routing-key", "other", "--dry-run"),
        ("quarantine", "discard", "1", "--dry-run"),
        ("batches", "list"),
        ("batches", "show", "nightly", "7"),
        ("batches", "give-up", "nightly", "7", "--dry-run"),
        ("lanes", "list"),
        ("lanes", "list", "--output", "json"),
        ("replay", "--all", "--dry-run"),
        ("jobs", "list"),
        ("jobs", "show", "1"),
        ("pool", "status"),
        ("pool", "status", "none"),
    )

    for command in commands:
        assert await ends.there(*command) == await ends.shown_here(*command), command


async def test_what_it_changes_is_the_same_and_the_audit_has_the_tokens_name(ends: Ends, rows: Rows) -> None:
    first, second = rows.parked("1"), rows.parked("2")
    rows.quarantined("nowhere")

    retried = await ends.there("parked", "retry", str(first), "99", *WHY)
    discarded = await ends.there("parked", "discard", str(second), "--yes", *WHY, "--output", "json")
    rerouted = await ends.there("quarantine", "reroute", "1", "--routing-key", "other", *WHY)
    probed = await ends.there("quarantine", "probe")
    paused = await ends.there("quarantine", "pause", "", "later", *WHY)
    resumed = await ends.there("quarantine", "resume", "3", *WHY, "--output", "json")
    lane = await ends.there("lanes", "pause", "7", *WHY)
    over = await ends.there("lanes", "resume", "7", *WHY)

    assert (retried.code, retried.out) == (3, "retried 1 row, and released 0 held behind it\n")
    assert json.loads(discarded.out) == {
        "chosen": 1, "released": 0, "not_found": [], "job": 2, "state": "done",
        "failed": 0, "waiting": None, "keys": None,
    }  # fmt: skip
    assert (rerouted.code, rerouted.out) == (0, "rerouted 1 row to exchange '', routing key 'other'\n")
    assert probed.code == 0
    words = "paused route 3, exchange '', routing key 'later': `relay quarantine resume 3` ends that\n"
    assert (paused.out, json.loads(resumed.out)["paused_at"]) == (words, None)
    assert (lane.out, over.out) == ("paused lane 7\n", "resumed lane 7\n")
    audit = rows.connection.execute("SELECT DISTINCT done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("program-owner", "fixed")]


async def test_a_list_of_several_pages_comes_whole(ends: Ends, rows: Rows) -> None:
    """The API gives 1000 rows at a time."""
    rows.connection.execute(MANY)

    listed = await ends.there("jobs", "list", "--limit", "1002", "--output", "json")

    assert [job["id"] for job in json.loads(listed.out)] == list(range(1003, 1, -1))


async def test_a_console_goes_on_with_its_job_and_not_with_that_of_a_command(ends: Ends, rows: Rows) -> None:
    rows.parked("1"), rows.parked("2")
    for by_console in (True, False):
        rows.connection.execute(PAUSED, [by_console])

    resumed = await ends.there("jobs", "resume", "1", *WHY)
    refused = await ends.there("jobs", "resume", "2", *WHY)
    too_fast = await ends.there("jobs", "resume", "1", "--rate", "5")

    assert (resumed.code, resumed.out) == (0, "retried 2 rows, and released 0 held behind them\n")
    assert refused.code == 2
    assert "`relay jobs resume 2` goes on" in refused.err
    assert (too_fast.code, "--rate" in too_fast.err) == (2, True)


async def test_letters_are_sent_back_and_thrown_away_by_the_console(ends: Ends, letters: Letters) -> None:
    ids = await letters.put_all(5)

    foreseen = await ends.there("dead-letters", "retry", QUEUE, ids[0], "--dry-run")
    retried = await ends.there("dead-letters", "retry", QUEUE, ids[0], *WHY)
    lacking = await ends.there("dead-letters", "retry", QUEUE, ids[1], "nowhere", *WHY)
    paced = await ends.there("dead-letters", "retry", QUEUE, "--all", "--limit", "1", "--rate", "50", *WHY)
    discarded = await ends.there("dead-letters", "discard", QUEUE, "--all", "--yes", *WHY, "--output", "json")

    assert (foreseen.code, foreseen.out) == (0, f"would retry 1 letter of {DEAD} into {QUEUE}\n")
    assert (retried.code, retried.out) == (0, f"sent 1 letter of {DEAD} into {QUEUE}\n")
    assert (lacking.code, "1 stay or are not there" in lacking.err) == (3, True)
    assert (paced.code, paced.out) == (0, f"sent 1 letter of {DEAD} into {QUEUE}\n")
    assert (discarded.code, json.loads(discarded.out)["done"]) == (0, 2)
    assert [each.message_id for each in await letters.consumed()] == ids[:3]


async def test_letters_are_looked_at_by_the_console(ends: Ends, letters: Letters, audit: Audit) -> None:
    ids = await letters.put_all(2)
    commands = (("dead-letters", "list", QUEUE), ("failures", "list", "--queue", QUEUE))

    for command in commands:
        assert await ends.there(*command) == await ends.here(*command), command
    shown = await ends.there("dead-letters", "show", QUEUE, ids[1], "--output", "json")

    assert json.loads(shown.out)["message_id"] == ids[1]
    noted = audit.execute("SELECT target, done_by FROM outbox.operator_audit").fetchall()
    assert noted == [{"target": ids[1], "done_by": "program-owner"}]


async def test_letters_are_sent_back_in_stages_by_the_console(ends: Ends, letters: Letters, audit: Audit) -> None:
    await letters.put_all(3)
    careful = ("--stages", "1,all", "--stop-when-failing", "0%")

    async with consuming(letters, audit, fails=lambda _: True):
        paused = await ends.there("dead-letters", "retry", QUEUE, "--all", *careful, *WHY)

    assert paused.code == 3
    assert f"is paused after 1 letters of {DEAD}: letters that failed while a stage of 1 was tried: 1" in paused.err
    assert "at most 0% may" in paused.err


async def test_held_messages_are_tried_by_the_console(ends: Ends, rows: Rows) -> None:
    held(rows.connection)

    tried = await ends.there("held", "retry", "--all", *WHY)

    assert (tried.code, tried.out) == (0, "1 message will be tried within seconds\n")
    audit = rows.connection.execute("SELECT command, done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("held retry", "program-owner", "fixed")]


async def test_the_token_may_be_in_a_file(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{ends.token}\n")

    listed = await ends.there("jobs", "list", RELAY_TOKEN="", RELAY_TOKEN_FILE=str(tmp_path / "token"))

    assert listed.code == 0


@pytest.mark.parametrize(
    ("arguments", "token", "code", "words"),
    [
        (("--server", "http://relay.test", "parked", "list"), "x", 2, "use https://"),
        (("--server", "relay.test", "parked", "list"), "x", 2, "--server takes the URL of a console"),
        (("--server", "http://127.0.0.1:1", "parked", "list"), "", 2, "--server needs a token"),
        (("--server", "http://127.0.0.1:1", "parked", "list"), "x", 1, "see that `relay console` runs there"),
        (("--server", "http://127.0.0.1:1", "parked", "list"), "x\ny", 2, "has a character that cannot be in a token"),
        (("--server", "http://127.0.0.1:1", "migrate"), "x", 2, "--server"),
        (("parked", "list", "--server", "http://127.0.0.1:1", "--config", "x"), "x", 2, "takes no other flag"),
    ],
)
def test_what_cannot_be_asked_is_told(
    tmp_path: Path, arguments: tuple[str, ...], token: str, code: int, words: str
) -> None:
    done = Command(tmp_path)(*arguments, RELAY_TOKEN=token)

    assert done.code == code
    assert words in done.err


def test_no_proxy_of_the_environment_reads_the_token(tmp_path: Path) -> None:
    """It would be sent there by http, as the console on this host is asked."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        asked = Command(tmp_path)(
            "--server", "http://127.0.0.1:1", "parked", "list", RELAY_TOKEN="x", HTTP_PROXY=address, http_proxy=address
        )

        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert "see that `relay console` runs there" in asked.err


async def test_a_token_that_counts_no_longer_is_refused(ends: Ends) -> None:
    refused = await ends.there("parked", "list", RELAY_TOKEN="x" * 43)

    assert (refused.code, refused.err) == (1, "relay: log in first\n")
