"""Two hosts of one broker, which can fail independently."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import SecretStr
from yarl import URL

from relay.config.settings import Settings
from tests.support.proxy import FaultProxy


def to_hosts(settings: Settings, *proxies: FaultProxy, **broker: float) -> Settings:
    """Return settings that name these proxies as the broker's hosts."""
    url = URL(settings.broker.url.get_secret_value())
    urls = ",".join(str(url.with_port(proxy.port)) for proxy in proxies)
    return with_url(settings, urls, **broker)


def with_url(settings: Settings, url: str, **broker: float) -> Settings:
    return settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": SecretStr(url), **broker})})


def broker_host(settings: Settings) -> tuple[str, int]:
    """Return the name and port for which a proxy can stand."""
    url = URL(settings.broker.url.get_secret_value())
    return str(url.host), url.port or 5672


@asynccontextmanager
async def two_hosts(settings: Settings) -> AsyncIterator[tuple[FaultProxy, FaultProxy]]:
    host = broker_host(settings)
    async with FaultProxy(*host) as first, FaultProxy(*host) as second:
        yield first, second
