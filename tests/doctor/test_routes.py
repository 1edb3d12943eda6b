"""A route whose routing keys fit into no message is told before its first row is parked."""

import pytest

from relay.config.settings import Route, Settings
from relay.operate.doctor.finding import Verdict
from relay.operate.doctor.settings import routes

LONG = "e" * 120


def verdicts(**route: str) -> list[Verdict]:
    return [found.verdict for found in routes(Settings(routes=(Route(exchange="outbox", **route),)))]


@pytest.mark.parametrize(
    "route",
    [
        {},
        {"event_type": LONG, "aggregate_type": LONG},
        {"event_type": f"{LONG}*{LONG}", "routing_key": "{event_type}." + "k" * 14},
        {"event_type": LONG, "routing_key": "{event_type}.{event_type}.{aggregate_id}"},
        {"event_type": "[a-z]" * 10 + "??*", "routing_key": "k" * 243 + "{event_type}"},
    ],
)
def test_a_route_that_can_make_a_short_key_is_fine(route: dict[str, str]) -> None:
    assert verdicts(**route) == [Verdict.OK]


@pytest.mark.parametrize(
    ("route", "size"),
    [
        ({"event_type": LONG, "aggregate_type": LONG + "a" * 15}, 256),
        ({"event_type": f"*{LONG}", "routing_key": "{event_type}.{event_type}." + "k" * 14}, 256),
        ({"event_type": "ä" * 70, "routing_key": "{event_type}{event_type}"}, 280),
        ({"event_type": "[a-z]" * 10 + "???*", "routing_key": "k" * 243 + "{event_type}"}, 256),
    ],
)
def test_a_route_whose_keys_are_all_too_long_is_told(route: dict[str, str], size: int) -> None:
    (found,) = routes(Settings(routes=(Route(exchange="outbox", **route),)))

    assert found.verdict is Verdict.FAILED
    assert f"at least {size} bytes; the limit is 255" in found.words
    assert found.remedy == "shorten its routing_key"
