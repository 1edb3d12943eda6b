"""A memory limit that the settings do not fit into is told by the checklist, and at the start of a relay."""

import pytest
from structlog.testing import capture_logs

from relay.config.settings import RelaySettings, Settings
from relay.engine.node import Node
from relay.operate.doctor import run
from relay.operate.doctor.settings import memory
from relay.runtime.memory import LEAST_WINDOW, MIB, Limit, largest_within, mib, needed, window_within
from tests.doctor.findings import OK, WARNING


@pytest.mark.parametrize("limit", [96, 160, 1024])
def test_what_is_derived_fits(limit: int) -> None:
    largest = min(largest_within(limit * MIB), 16 * MIB)
    window = window_within(limit * MIB, largest)

    found = memory(RelaySettings(max_message_bytes=largest, max_window_bytes=window), Limit(limit * MIB, "a group"))

    assert found.verdict == OK
    assert "(a group)" in found.words


def test_a_limit_too_low_for_one_message_names_one_that_is_not() -> None:
    found = memory(RelaySettings(), Limit(100 * MIB, "a group"))

    assert found.verdict == WARNING
    enough, fits = mib(needed(LEAST_WINDOW, 16 * MIB)), largest_within(100 * MIB)
    assert found.remedy == f"raise the limit to {enough}, or lower relay.max_message_bytes to {fits}"


def test_a_window_that_was_set_too_large_is_told() -> None:
    found = memory(RelaySettings(max_window_bytes=64 * MIB), Limit(160 * MIB, "a group"))

    assert found.verdict == WARNING
    assert found.remedy == f"unset relay.max_window_bytes, or lower it to {window_within(160 * MIB, 16 * MIB)}"


async def test_it_is_told_at_the_start_before_there_is_a_database(settings: Settings) -> None:
    huge = settings.model_copy(update={"relay": RelaySettings(max_window_bytes=1 << 50)})

    with capture_logs() as events:
        async with run.warning(huge, Node(huge)):
            told = [event["check"] for event in events if event["event"] == "doctor.warning"]

    assert told == ["settings.memory"]
