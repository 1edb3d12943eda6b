"""Trusted proxies: who they are, and what they say of a request."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address, ip_network

from starlette.requests import Request

from relay.config.settings import ConsoleSettings
from relay.console.access.groups import names, role_of
from relay.console.access.identity import Identity, RefusedError


def proxy_identifier(console: ConsoleSettings) -> Callable[[Request], Awaitable[Identity | None]]:
    """Return what finds out the user from the headers of a trusted proxy."""

    async def identify(request: Request) -> Identity | None:
        """Return whom the proxy names.

        Raises:
            RefusedError: the request comes from an address that is no trusted proxy, or the user has no role.
        """
        peer = request.client.host if request.client else ""
        if not _is_trusted(peer, console):
            words = f"{peer} is no trusted proxy: ask the proxy in front of this console (console.trusted_proxies)"
            raise RefusedError(HTTPStatus.FORBIDDEN, words)
        # More than one of a header may be one of the user's making, which the proxy did not take away.
        told = request.headers.getlist(console.proxy_name_header)
        groups = request.headers.getlist(console.proxy_groups_header)
        if len(told) != 1 or not told[0] or len(groups) > 1:
            return None
        role = role_of(names(groups[0]) if groups else (), console)
        if role is None:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"no group of {told[0]} has a role in this console")
        return Identity(told[0], role)

    return identify


def client_address(request: Request, console: ConsoleSettings) -> str:
    """Return the address of the client, which a trusted proxy may tell."""
    peer = request.client.host if request.client else ""
    for told in reversed(names(",".join(request.headers.getlist("X-Forwarded-For")))):
        if not _is_trusted(peer, console):
            break
        peer = told
    return peer


def _is_trusted(address: str, console: ConsoleSettings) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return any(found in ip_network(network) for network in names(console.trusted_proxies))
