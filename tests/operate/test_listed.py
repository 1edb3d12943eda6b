"""Which listed bindings and queues take the messages for an address."""

import pytest

from relay.config.topology import TopologySettings
from relay.operate.routes.listed import is_topic_match, listed_for

TOPOLOGY = TopologySettings.model_validate(
    {
        "exchanges": [
            {"name": "billing"},
            {"name": "all", "type": "fanout"},
            {"name": "exact", "type": "direct"},
            {"name": "by-headers", "type": "headers"},
        ],
        "queues": [{"name": "invoices"}, {"name": "copy"}],
        "bindings": [
            {"exchange": "billing", "queue": "invoices", "routing_key": "customer.*"},
            {"exchange": "billing", "to_exchange": "all"},
            {"exchange": "billing", "to_exchange": "exact", "routing_key": "#"},
            {"exchange": "all", "queue": "copy"},
            {"exchange": "all", "to_exchange": "billing"},
            {"exchange": "exact", "queue": "copy", "routing_key": "one"},
            {"exchange": "by-headers", "queue": "copy"},
        ],
    }
)


@pytest.mark.parametrize(
    ("exchange", "routing_key", "found"),
    [
        ("", "copy", ["queue copy"]),
        ("", "gone", []),
        ("gone", "copy", []),
        ("billing", "customer.7", ["binding billing -> invoices (customer.*)"]),
        ("billing", "customer.7.x", []),
        ("billing", "one", ["binding billing -> exact (#)", "binding exact -> copy (one)"]),
        ("all", "customer.7", [
            "binding all -> copy", "binding all -> billing", "binding billing -> invoices (customer.*)"]),
        ("exact", "one", ["binding exact -> copy (one)"]),
        ("exact", "two", []),
        ("by-headers", "any", ["binding by-headers -> copy"]),
    ],
)  # fmt: skip
def test_what_is_listed_for_an_address(exchange: str, routing_key: str, found: list[str]) -> None:
    assert listed_for(TOPOLOGY, exchange, routing_key) == found


@pytest.mark.parametrize(
    ("pattern", "key", "is_match"),
    [
        ("a.b", "a.b", True), ("a.b", "a.c", False), ("*", "a", True), ("*", "a.b", False), ("*", "", False),
        ("#", "", True), ("#", "a.b.c", True), ("a.#", "a", True), ("a.#", "ab", False), ("#.z", "a.b.z", True),
        ("a.*.c", "a.b.c", True), ("a.*.c", "a.c", False), ("a.#.c.#", "a.c.d.c", True), ("", "", True),
        ("", "a", False), ("#.#", "a", True), (".".join("#" * 128), ".".join("x" * 128), True),
    ],
)  # fmt: skip
def test_a_topic_is_matched_as_the_broker_does(pattern: str, key: str, is_match: bool) -> None:
    assert is_topic_match(pattern, key) == is_match
