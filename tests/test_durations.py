"""A length of time is written in the same ways in every setting and flag."""

from pathlib import Path

import pytest

from outbox_spark.asked import write_options
from outbox_spark.errors import OptionError
from outbox_spark.options import Use, options_of
from relay.config.durations import parse_duration, seconds_of
from relay.config.keys import all_keys, table_keys
from relay.config.loading import load
from relay.config.settings import days_kept
from relay.config.topology import Queue
from relay.errors import ConfigurationError
from relay.operate.sent.moment import parse_length
from tests.cli.command import Command


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90 seconds", 90), ("1.5 h", 5400), ("30m", 1800), ("1 minute", 60), ("14d", 1_209_600)],
)
def test_what_it_says(text: str, seconds: float) -> None:
    settings = load(environ={"RELAY_START_TIMEOUT": text}).settings

    assert parse_duration(text).total_seconds() == parse_length(text, "--grace").total_seconds() == seconds
    assert settings.relay.start_timeout == seconds


def test_every_setting_that_is_a_length_of_time_takes_it_in_words(tmp_path: Path) -> None:
    told = [key.takes for key in (*all_keys(), *table_keys(Queue))]
    (tmp_path / "relay.toml").write_text('[[topology.queues]]\nname = "q"\nmessage_ttl = "14d"\n')
    settings = load(config=tmp_path / "relay.toml", environ={"RELAY_BROKER_HEARTBEAT": "30s"}).settings

    assert (settings.broker.heartbeat, settings.topology.queues[0].message_ttl) == (30, 1_209_600)
    assert [each for each in told if "second" in each and "or as in" not in each] == []


def test_an_option_of_spark_takes_what_a_setting_does() -> None:
    given = {name: "x" for name, option in options_of(Use.WRITE).items() if option.is_required} | {
        "url": "postgresql://h/d"
    }
    for text in ("90s", "90 seconds", "1.5 h", "30m", "1 minute", "2h", "600"):
        assert write_options({**given, "maxPendingWait": text}).max_pending_wait == float(str(seconds_of(text)))
    assert write_options({**given, "stagingMaxAge": "14 days"}).staging_max_age == 1_209_600
    for text in ("soon", "2d", "0.5s", "1.5", "99999999999d"):
        with pytest.raises(
            OptionError, match="option maxPendingWait takes whole seconds from 1 to 86400, or as in '2h'"
        ):
            write_options({**given, "maxPendingWait": text})


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
        load(environ={"RELAY_RETENTION": text})


def test_a_flag_takes_both_and_says_so(tmp_path: Path) -> None:
    relay = Command(tmp_path)

    assert relay("migrate", "--sql", "--wait", "2m", "--lock-timeout", "1.5").code == 0
    wrong = relay("migrate", "--sql", "--wait", "soon")
    assert (wrong.code, "such as 90s, 30 minutes, 2h, 14 days; not 'soon'" in wrong.err) == (2, True)
