"""Where the relay sends declared events, and which listed queues take them, by the settings alone."""

from dataclasses import dataclass

from relay.config.settings import CloudEvents, Settings
from relay.engine.send.routes import Router
from relay.operate.routes.listed import queues_for
from relay.outbox.declared import Declaration


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where messages of an event go, unless the event itself names an exchange or a routing key.

    Attributes:
        routing_key: with `{aggregate_id}` where messages differ by it; a listed binding takes that as one word.
        queues: those of relay.toml that get the messages.
        cloudevents: whether the messages are CloudEvents.
    """

    exchange: str
    routing_key: str
    queues: tuple[str, ...]
    cloudevents: CloudEvents


def address_of(declaration: Declaration, settings: Settings) -> EventAddress:
    """Return the address of the messages of an event."""
    router = Router.of(settings)
    exchange, key = router.address_of_kind(None, None, declaration.aggregate_type, declaration.event_type)
    route = router.route(declaration.aggregate_type.encode(), declaration.event_type.encode())
    return EventAddress(exchange, key, tuple(queues_for(settings.topology, exchange, key)), route.cloudevents)
