"""What `[topology]` lists, as RabbitMQ's own tools read it: `rabbitmqctl import_definitions FILE`."""

from collections.abc import Mapping
from typing import Any

from relay.config.settings import Settings
from relay.servers.rabbitmq.hosts import broker_urls


def definitions(settings: Settings) -> Mapping[str, list[dict[str, Any]]]:
    """Return the exchanges, queues and bindings for the virtual host of the first URL in `broker.url`."""
    topology = settings.topology
    vhost = broker_urls(settings.broker)[0].path.removeprefix("/") or "/"
    return {
        "exchanges": [
            {
                "name": each.name,
                "vhost": vhost,
                "type": each.type,
                "durable": each.durable,
                "auto_delete": False,
                "internal": False,
                "arguments": each.amqp_arguments(),
            }
            for each in topology.exchanges
        ],
        "queues": [
            {
                "name": each.name,
                "vhost": vhost,
                "durable": each.durable,
                "auto_delete": False,
                "arguments": each.amqp_arguments(),
            }
            for each in topology.queues
        ],
        "bindings": [
            {
                "source": each.exchange,
                "vhost": vhost,
                "destination": each.queue or each.to_exchange,
                "destination_type": "queue" if each.queue else "exchange",
                "routing_key": each.routing_key,
                "arguments": each.arguments,
            }
            for each in topology.bindings
        ],
    }
