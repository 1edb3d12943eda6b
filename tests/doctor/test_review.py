"""The answers for the design review follow the settings and the code, and do not hold when these do not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.settings import BrokerSettings, HttpSettings, RelaySettings, Route, Settings
from relay.engine.send import broker_link as link
from relay.engine.send import frames
from relay.engine.send import message as messages
from relay.operate.doctor.finding import Finding
from relay.operate.doctor.review import review
from tests.doctor.findings import FAILED, OK, WARNING


def answer(name: str, **sections: Any) -> Finding:
    (finding,) = [each for each in review(Settings(**sections)) if each.check == f"review.{name}"]
    return finding


def test_a_message_is_stable_told_apart_mandatory_and_persistent() -> None:
    found = {each.check: each for each in review(Settings(relay=RelaySettings(max_message_bytes=1)))}

    for name in ("message_id", "repeats", "mandatory", "persistence", "confirms", "codec", "returns"):
        assert found[f"review.{name}"].verdict == OK
    assert found["review.persistence"].words == "messages have delivery mode 2 (persistent)"


def test_what_the_encoder_leaves_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MANDATORY", 0)
    monkeypatch.setattr(frames, "PERSISTENT", 1)
    monkeypatch.setattr(messages, "REDELIVERED", "x-something-else")
    monkeypatch.setattr(link, "CONFIRMS", False)

    assert [each.check for each in review(Settings()) if each.verdict == FAILED] == [
        "review.repeats",
        "review.mandatory",
        "review.persistence",
        "review.confirms",
    ]


def test_in_flight() -> None:
    fine = answer("in_flight", relay=RelaySettings(max_in_flight=100, max_window_rows=100))
    smaller = answer("in_flight", relay=RelaySettings(max_in_flight=101, max_window_rows=100))

    assert (fine.verdict, smaller.verdict) == (OK, WARNING)
    assert fine.words.startswith("at most 100 messages are unconfirmed; at most 100 rows and 64 MiB")


def test_timeouts() -> None:
    fine = answer("timeouts", broker=BrokerSettings(confirm_timeout=11, heartbeat=5))
    short = answer("timeouts", broker=BrokerSettings(confirm_timeout=10, heartbeat=5))

    assert (fine.verdict, short.verdict) == (OK, WARNING)
    assert fine.words.startswith("no confirm within 11 s means unknown")


def test_retry() -> None:
    fine = answer("retry", relay=RelaySettings(max_attempts=3, backoff_initial=10, backoff_max=15))
    never = answer("retry", relay=RelaySettings(max_attempts=1))

    assert (fine.verdict, never.verdict) == (OK, WARNING)
    assert "Refused 3 times in 12 to 25 s" in fine.words


@pytest.mark.parametrize(
    ("listen", "retention", "verdict"),
    [("0.0.0.0:8080", "9 days", OK), ("", "9 days", WARNING), ("0.0.0.0:8080", "off", WARNING)],
)
def test_growth(listen: str, retention: str, verdict: str) -> None:
    finding = answer("growth", http=HttpSettings(listen=listen), relay=RelaySettings(retention=retention))

    assert finding.verdict == verdict
    assert ("kept for 9 days" in finding.words) is (retention == "9 days")
    assert ("relay config alerts" in finding.remedy) is (not listen)
    assert ("relay.retention" in finding.remedy) is (retention == "off")


NAMES = st.text("abz.-_*?[]", min_size=1, max_size=20)
ROUTES = st.builds(
    lambda event, exchange, key: Route(event_type=event, exchange=exchange, routing_key=key),
    NAMES,
    st.one_of(st.just(""), NAMES),
    st.sampled_from(["{event_type}", "a.{aggregate_id}", "b"]),
)


@given(
    exchange=st.one_of(st.just(""), NAMES),
    allowed=st.lists(NAMES, min_size=1, max_size=3).map(",".join),
    routes=st.lists(ROUTES, max_size=3).map(tuple),
    attempts=st.integers(1, 1000),
    in_flight=st.integers(1, 65_535),
    bytes_=st.integers(1, 1_000_000),
)
def test_whatever_the_settings_say_the_answers_hold(
    exchange: str, allowed: str, routes: tuple[Route, ...], attempts: int, in_flight: int, bytes_: int
) -> None:
    settings = Settings(
        broker=BrokerSettings(exchange=exchange, allowed_exchanges=allowed),
        relay=RelaySettings(max_attempts=attempts, max_in_flight=in_flight, max_message_bytes=bytes_),
        routes=routes,
    )

    assert [each for each in review(settings) if each.verdict == FAILED] == []
