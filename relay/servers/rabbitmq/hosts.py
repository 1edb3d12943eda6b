"""The hosts of `broker.url`: each address of each name is a host, and names are resolved again each time."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from yarl import URL

from relay.config.settings import BrokerSettings
from relay.config.urls import amqp_urls
from relay.errors import BrokerUnavailableError, ConfigurationError, PublicReason
from relay.runtime.threads import call_in_daemon

TAKES = "amqp:// or amqps:// URLs separated by commas, like amqp://user:password@host:5672/vhost"

# Each process tries the addresses of a name in an order that depends on this. The order does not depend on DNS.
SALT = os.urandom(8)


@dataclass(frozen=True, slots=True)
class BrokerHost:
    """One address of a name; `str` returns the text for errors."""

    url: URL  # with the name that the host's certificate must have
    address: str  # IPv4 or IPv6

    def __str__(self) -> str:
        return place(self.url) + ("" if self.address == self.url.host else f" ({self.address})")


def broker_urls(broker: BrokerSettings) -> list[URL]:
    """Return each URL, in the order in which they are tried.

    Raises:
        ConfigurationError: no URL is given, or one is no AMQP URL.
    """
    urls = broker.url.get_secret_value()
    if not urls:
        raise ConfigurationError(f"broker.url (RELAY_BROKER_URL) is not set; it takes {TAKES}")
    try:
        return amqp_urls(urls)
    except ValueError as error:  # the settings were made without validation
        raise ConfigurationError(str(error) or f"broker.url (RELAY_BROKER_URL) takes {TAKES}") from None


def place(url: URL) -> str:
    """Return the host and port of a URL."""
    return f"{url.host_subcomponent}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"


def vhost(url: URL) -> str:
    """Return the virtual host of a URL, as the library reads it."""
    return url.path.removeprefix("/").replace("%2F", "/") or "/"


async def in_turn(
    urls: Sequence[URL], *, after: BrokerHost | None, within: float
) -> AsyncGenerator[BrokerHost | BrokerUnavailableError, None]:
    """Yield every host once, or why a name has no address; a name is resolved when its turn comes.

    Args:
        within: seconds to resolve a name.
        after: the host after which the order begins, so that it comes last.
    """
    begin = next((n for n, url in enumerate(urls) if after is not None and place(url) == place(after.url)), 0)
    last: list[BrokerHost] = []
    for url in (*urls[begin:], *urls[:begin]):
        try:
            hosts = await addresses(url, within)
        except BrokerUnavailableError as error:
            yield error
            continue
        places = [str(host) for host in hosts]
        if not last and str(after) in places:
            behind = places.index(str(after)) + 1
            hosts, last = hosts[behind:], hosts[:behind]
        for host in hosts:
            yield host
    for host in last:
        yield host


async def addresses(url: URL, within: float) -> list[BrokerHost]:
    """Return each address that the URL's name has now as a host, in the order in which this process tries them.

    Raises:
        BrokerUnavailableError: the name has no address, or DNS does not answer within `within` seconds.
    """
    name = str(url.host)
    if _is_address(name):
        return [BrokerHost(url, name)]
    try:
        async with asyncio.timeout(within):
            found = await _resolve(name)
    except TimeoutError:
        raise _unresolved(url, f"the name is not resolved within {within:g} s") from None
    except (OSError, UnicodeError) as error:
        raise _unresolved(url, error.args[-1]) from None
    return [BrokerHost(url, address) for address in sorted(found, key=lambda address: hash((SALT, address)))]


def _unresolved(url: URL, why: object) -> BrokerUnavailableError:
    return BrokerUnavailableError(f"{place(url)}: {why}", public=PublicReason.NAME_NOT_RESOLVED)


async def is_listed(host: BrokerHost, urls: Sequence[URL], within: float) -> bool:
    """Whether one of the URLs leads to this host with the same user, virtual host and parameters, such as those of TLS.

    If a name is not resolved within `within` seconds, it is assumed to have the same address as before.
    """
    for url in urls:
        if _target(url) == _target(host.url):
            try:
                found = await addresses(url, within)
            except BrokerUnavailableError:
                return True
            if host.address in (one.address for one in found):
                return True
    return False


async def _resolve(name: str) -> set[str]:
    ask = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in await call_in_daemon(ask, name=f"resolve:{name}")}


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _target(url: URL) -> tuple[str, str, str | None, str, list[tuple[str, str]]]:
    return url.scheme, place(url), url.user, vhost(url), sorted(url.query.items())
