"""The exchanges, queues and bindings of a broker, read from its own export and not over AMQP."""

import json
from dataclasses import dataclass
from typing import Any

from relay.testing.servers.rabbitmq import RabbitServer


@dataclass(frozen=True, slots=True)
class Definitions:
    """The exchanges and queues of a virtual host by name, and its bindings, without those that each broker has."""

    exchanges: dict[str, dict[str, Any]]
    queues: dict[str, dict[str, Any]]
    bindings: list[tuple[str, str, str, str, dict[str, Any]]]  # source, kind and name of the target, key, arguments


def definitions(node: RabbitServer, url: str) -> Definitions:
    """Return the definitions of the virtual host that the URL names."""
    vhost = url.rpartition("/")[2]
    found = {
        kind: [each for each in listed if each.get("vhost") == vhost]
        for kind, listed in json.loads(node.ctl("export_definitions", "-")).items()
        if kind in ("exchanges", "queues", "bindings")
    }
    named = {
        kind: {
            each["name"]: {key: value for key, value in each.items() if key not in ("name", "vhost")}
            for each in found[kind]
        }
        for kind in ("exchanges", "queues")
    }
    bindings = sorted(
        (each["source"], each["destination_type"], each["destination"], each["routing_key"], each["arguments"])
        for each in found["bindings"]
    )
    return Definitions(named["exchanges"], named["queues"], bindings)
