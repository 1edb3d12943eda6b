"""Events that count up by key, and what arrived of them."""

from collections.abc import Iterable, Sequence

from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr

from relay.config.settings import BrokerSettings
from relay.outbox import Event
from relay.publisher import DurablePublisher, Mode

NOWHERE = BrokerSettings(url=SecretStr("amqp://127.0.0.1:1/"))


def measured(number: int, key: str | None = "a", **fields: object) -> Event:
    return Event("sensor", key, "Measured", {"number": number}, **fields)  # type: ignore[arg-type]


async def publish_all(publisher: DurablePublisher, numbers: Iterable[int], key: str = "a") -> list[str]:
    """Publish one after the other; give the message ids."""
    events = [measured(number, key) for number in numbers]
    for event in events:
        await publisher.publish(event)
    return [str(event.message_id) for event in events]


def is_direct(publisher: DurablePublisher) -> bool:
    return publisher.state.mode is Mode.DIRECT


def first_of_each(messages: Sequence[AbstractIncomingMessage]) -> dict[str, list[str]]:
    """Return the message ids of each key in the order in which each came first."""
    seen: dict[str, dict[str, None]] = {}
    for message in messages:
        seen.setdefault(str(message.headers.get("x-aggregate-id")), {}).setdefault(str(message.message_id))
    return {key: list(ids) for key, ids in seen.items()}
