"""Declare at the broker what relay.toml lists, as an operator asks for it, and let the relays try the routes then.

The audit has the request before anything is declared, and then each exchange, queue and binding that was.
"""

import asyncio

from relay.operate.asked import MaybeReasoned, Nothing
from relay.operate.audit import note
from relay.operate.operation import Effect, Role, Servers, operation
from relay.operate.routes.quarantine import failing_routes, probe
from relay.servers.rabbitmq import topology
from relay.servers.rabbitmq.topology import Declared, Standing

COMMAND = "topology apply"


class ApplyTopology(MaybeReasoned):
    """What is declared is what the settings list; why, if that is told."""


@operation("topology.compare", "GET /topology/compare", Role.VIEWER, is_alone=True)
def compare(at: Servers, _: Nothing) -> list[Declared]:
    """Return what is missing at the broker and what differs; declares nothing."""
    return asyncio.run(topology.apply(at.settings.broker, at.settings.topology, dry_run=True))


@operation("topology.apply", "POST /topology/apply", Role.OWNER, Effect.ELSEWHERE, is_alone=True)
def apply(at: Servers, asked: ApplyTopology) -> list[Declared]:
    """Declare what is missing and compare the rest; nothing that is there is changed or taken away.

    Then the relays try the routes in quarantine that nobody has paused.
    """
    things = topology.listed(at.settings.topology)
    words = f"{len(things)} exchanges, queues and bindings that relay.toml lists"
    with at.connect(None) as tables:
        note(tables, COMMAND, words, by=at.by, why=asked.reason)
    results = asyncio.run(topology.apply(at.settings.broker, at.settings.topology))
    with at.connect(None) as tables, tables.transaction():
        for each in results:
            if each.standing in (Standing.DECLARED, Standing.BOUND):
                note(tables, COMMAND, f"{each.kind} {each.name}", by=at.by, why=asked.reason)
        probe(tables, [route.id for route in failing_routes(tables)])
    return results
