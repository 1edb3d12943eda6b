"""What the library `cloudevents` reads of a message."""

from aio_pika.abc import AbstractIncomingMessage
from cloudevents.core.bindings import amqp, rabbitmq
from cloudevents.core.v1.event import CloudEvent


def by_rabbitmq(message: AbstractIncomingMessage) -> CloudEvent:
    """Read a message as the binding for RabbitMQ says; raises if it is no valid CloudEvent."""
    texts = {name: value for name, value in message.headers.items() if isinstance(value, str)}
    return rabbitmq.from_rabbitmq_event(rabbitmq.RabbitMQMessage(texts, message.content_type, message.body))


def by_amqp(message: AbstractIncomingMessage) -> CloudEvent:
    """Read a message as the binding for AMQP 1.0 says; raises if it is no valid CloudEvent."""
    properties = {amqp.CONTENT_TYPE_PROPERTY: message.content_type}
    return amqp.from_amqp_event(amqp.AMQPMessage(properties, dict(message.headers), message.body))
