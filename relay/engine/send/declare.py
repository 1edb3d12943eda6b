"""What a relay declares at its start, and never on a reconnect: `relay.broker.topology` says why."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from relay.broker.connection import Connection
from relay.broker.topology import Declared, Standing, Thing, declare, default_exchange, failed
from relay.config.settings import BrokerSettings
from relay.logger import get_logger

log = get_logger(__name__)

TRIES = 3  # of one thing, each on a connection of its own: what ends every connection must not keep us from starting


@dataclass(slots=True)
class Undeclared:
    """Something to declare; `compare` also when it is there."""

    thing: Thing
    compare: bool
    tries: int = 0


def undeclared(broker: BrokerSettings, things: Sequence[Thing]) -> deque[Undeclared]:
    """Give the default exchange, which may be bound, and what is listed; nothing when `broker.declare` is off."""
    if not broker.declare:
        return deque()
    waiting = deque(Undeclared(thing, compare=True) for thing in things)
    if (exchange := default_exchange(broker, things)) is not None:
        waiting.appendleft(Undeclared(exchange, compare=False))
    return waiting


async def declare_at_start(connection: Connection, waiting: deque[Undeclared]) -> None:
    """Declare what waits, and tell what is not as it should be: the relay runs with what is there.

    What is settled is taken out: nothing is left for a reconnect.

    Raises:
        OSError: the connection was lost, or has no answer; what waits can be tried on another.
    """
    while waiting:
        first = waiting[0]
        first.tries += 1
        try:
            result = await declare(connection, first.thing, compare=first.compare)
        except OSError as error:
            if first.tries == TRIES:
                waiting.popleft()
                _tell(failed(first.thing, error))
            raise
        waiting.popleft()
        _tell(result)


def _tell(result: Declared) -> None:
    kind, name = result.kind, result.name
    if result.standing is Standing.DECLARED:
        log.info("topology.declared", kind=kind, name=name)
    elif result.standing is Standing.DIFFERS:
        log.warning("topology.differs", kind=kind, name=name, reason=result.words, remedy=result.remedy)
    elif result.standing is Standing.FAILED:
        log.warning("topology.failed", kind=kind, name=name, reason=result.words, remedy=result.remedy)
