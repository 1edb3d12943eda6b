"""How far a replay is: a bar on a terminal, a log event now and then elsewhere."""

import asyncio
import os
import pty
import re

from tests.cli.command import RELAY
from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows


async def test_a_terminal_gets_a_bar(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(3000)
    ours, theirs = pty.openpty()
    environment = {**relay.environment, "TERM": "xterm", "COLUMNS": "100"}

    arguments = ("replay", "--all", "--rate", "1500")
    replaying = await asyncio.create_subprocess_exec(RELAY, *arguments, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = await asyncio.to_thread(read_to_end, ours)
    await replaying.wait()

    counts = [int(count) for count in re.findall(r"(\d+)/3000", shown)]
    assert replaying.returncode == 0, shown
    assert "replay 1" in shown
    assert any(0 < count < 3000 for count in counts), shown
    assert counts == sorted(counts)
    assert "replay 1 is done: 3000 rows replayed" in shown


async def test_a_log_gets_an_event_now_and_then(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(700)

    ended = await relay("replay", "--all", "--rate", "100")

    assert ended.code == 0
    assert '"selected": 700' in ended.said
    assert '"event": "replay.progressed"' in ended.said


def read_to_end(terminal: int) -> str:
    """Return all that a terminal gets until nobody writes to it any more."""
    shown = b""
    try:
        while block := os.read(terminal, 4096):
            shown += block
    except OSError:  # the last writer has closed its end
        pass
    finally:
        os.close(terminal)
    return shown.decode()
