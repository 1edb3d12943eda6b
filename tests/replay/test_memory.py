"""What a replay holds in memory is bounded by its window, and not by what is selected."""

import re
from pathlib import Path

import pytest

from relay.testing.servers.process import Process
from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults
from tests.support.eventually import eventually

MIB = 1024  # kB
QUEUE = ("--to-exchange", "", "--routing-key", "nowhere")


@pytest.mark.drills
async def test_ten_times_as_many_rows_need_no_more_memory(relay: Commands, sent: SentRows, copies: Copies) -> None:
    """54,000 rows are replayed after 6,000; the peak of memory stays."""
    await copies.channel.declare_queue("nowhere", durable=True)
    peaks = []
    for number in (6_000, 54_000):
        await sent.add(number, keys=1000, pad=500)
        peaks.append(await peak(relay, relay.start("replay", "--all", "--rate", "100000", *QUEUE)))

    assert await sent.value("SELECT max(done) FROM outbox.job") == 60_000
    assert peaks[1] - peaks[0] < 15 * MIB


@pytest.mark.drills
async def test_large_rows_are_read_a_few_at_a_time(relay: Commands, sent: SentRows, copies: Copies) -> None:
    """300 rows of 1 MiB are replayed with a window of 8 MiB; memory stays far below their sum."""
    ids = await sent.add(300, pad=10)
    small = await peak(relay, relay.start("replay", "--all"))
    await sent.connection.execute("TRUNCATE outbox.message")
    assert faults(ids, await copies.read()) == []
    await copies.channel.declare_queue("nowhere", durable=True)
    await sent.add(300, pad=1024 * 1024)

    bound = {"RELAY_MAX_WINDOW_BYTES": str(8 * 1024 * 1024)}
    large = await peak(relay, relay.start("replay", "--all", *QUEUE, **bound))

    assert await sent.value("SELECT max(done) FROM outbox.job WHERE id = 2") == 300
    assert large - small < 80 * MIB  # of 300 MiB; what is on its way is in several buffers


async def peak(relay: Commands, process: Process) -> int:
    """Wait for its end and give the most memory that it had at one time, in kB."""
    seen = [0]

    def look() -> bool:
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            found = None
        seen.append(int(found[1]) if found else 0)
        return not process.is_running()

    await eventually(look, "the command ends", 100)
    assert (await relay.end(process)).code == 0
    return max(seen)
