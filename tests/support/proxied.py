"""A proxy in front of a server, and the settings that lead through it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import SecretStr
from yarl import URL

from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.support.proxy import FaultProxy

Server = TypeVar("Server", BrokerSettings, DatabaseSettings)


@asynccontextmanager
async def proxied(server: Server, **values: float) -> AsyncIterator[tuple[FaultProxy, Server]]:
    """Yield a proxy in front of the server, and the settings of a client that connects through the proxy.

    `values`: settings of that client in place of those in `server`.
    """
    port = URL(server.url.get_secret_value()).port
    assert port is not None
    async with FaultProxy("127.0.0.1", port, amqp=isinstance(server, BrokerSettings)) as proxy:
        yield proxy, with_port(server, proxy.port).model_copy(update=values)


def with_port(server: Server, port: int) -> Server:
    """Return the settings with another port: same user, same database or virtual host."""
    url = URL(server.url.get_secret_value()).with_port(port)
    return server.model_copy(update={"url": SecretStr(str(url))})
