"""Connections to RabbitMQ: a list of hosts, a deadline on every step, and no password in any error."""

import asyncio
from collections.abc import Sequence

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import AMQPError
from yarl import URL

from relay.errors import BrokerUnavailableError, ConfigurationError
from relay.settings import BrokerSettings


def broker_urls(broker: BrokerSettings) -> list[URL]:
    """Give the URL of each host, in the order in which they are tried.

    Raises:
        ConfigurationError: one of them is no AMQP URL.
    """
    urls = [URL(part.strip()) for part in broker.url.get_secret_value().split(",") if part.strip()]
    if not urls or any(url.scheme not in ("amqp", "amqps") or not url.host for url in urls):
        raise ConfigurationError(
            "broker.url (RELAY_BROKER_URL) takes amqp:// or amqps:// URLs separated by commas,"
            " like amqp://user:password@host:5672/vhost"
        )
    return urls


async def connect(broker: BrokerSettings, name: str) -> AbstractConnection:
    """Open a connection to the first host that lets us in; `name` is shown in the broker's list of connections.

    It is not a robust one: those declare exchanges and queues anew after a reconnect, which loses messages
    in a split, and who publishes must know that the connection was lost.

    Raises:
        BrokerUnavailableError: no host lets us in; it names each host and why.
    """
    urls = broker_urls(broker)
    reasons = []
    for url in urls:
        try:
            return await aio_pika.connect(
                # A mute broker is noticed after three missed heartbeats; the library's 60 s would mean minutes.
                url.update_query(heartbeat=str(broker.heartbeat)),
                timeout=broker.connect_timeout,
                client_properties={"connection_name": name, "product": broker.app_id},
            )
        except TimeoutError:
            reasons.append(f"{_place(url)}: no answer within {broker.connect_timeout:g} s")
        except (AMQPError, OSError) as error:
            reasons.append(f"{_place(url)}: {_words(error)}")
        except asyncio.CancelledError:
            # The library raises it, too, when the peer resets the connection during the handshake.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            reasons.append(f"{_place(url)}: the connection was reset")
    raise BrokerUnavailableError("; ".join(reasons))


def _place(url: URL) -> str:
    return f"{url.host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"


def _words(error: Exception) -> str:
    return " ".join(_text(error.args).split()) or type(error).__name__


def _text(args: Sequence[object]) -> str:
    return " ".join(str(arg) for arg in args if arg is not None)
