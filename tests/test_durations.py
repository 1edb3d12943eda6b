"""A length of time is written in the same ways in every setting and flag."""

from pathlib import Path

import pytest

from relay.config.durations import parse_duration
from relay.config.loading import load
from relay.config.settings import days_kept
from relay.errors import ConfigurationError
from relay.replay.moment import parse_length
from tests.cli.command import Command


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90 seconds", 90), ("1.5 h", 5400), ("30m", 1800), ("1 minute", 60), ("14d", 1_209_600)],
)
def test_what_it_says(text: str, seconds: float) -> None:
    settings = load(environ={"RELAY_RELAY__START_TIMEOUT": text}).settings

    assert parse_duration(text).total_seconds() == parse_length(text, "--grace").total_seconds() == seconds
    assert settings.relay.start_timeout == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1 s", "14 days ", "2 weeks", "99999999999d"])
def test_what_it_is_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "days"), [("14d", 14), ("1 day", 1), ("48h", 2), ("off", None)])
def test_days_are_kept(text: str, days: int | None) -> None:
    assert days_kept(text) == days


@pytest.mark.parametrize("text", ["0d", "36h", "100000 days"])
def test_only_whole_days_are_kept(text: str) -> None:
    with pytest.raises(ConfigurationError, match="it takes days as in"):
        load(environ={"RELAY_RELAY__RETENTION": text})


def test_a_flag_takes_both_and_says_so(tmp_path: Path) -> None:
    relay = Command(tmp_path)

    assert relay("migrate", "--sql", "--wait", "2m", "--lock-timeout", "1.5").code == 0
    wrong = relay("migrate", "--sql", "--wait", "soon")
    assert (wrong.code, "such as 90s, 30 minutes, 2h, 14 days; not 'soon'" in wrong.err) == (2, True)
