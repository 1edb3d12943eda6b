"""Where a row goes: to the address in the row, else by the first route that matches, else to the default exchange."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase, translate
from typing import Self

from relay.config.settings import CloudEvents, Route, Settings, Unroutable
from relay.engine.row import Address, Row
from relay.engine.send.message import UnsendableError

ROUTES_CACHED = 10_000
PLACEHOLDER = re.compile(rb"{(?:event_type|aggregate_type|aggregate_id)}")
DEFAULT_ROUTING_KEY = "{aggregate_type}.{event_type}"
# The limit for a name that is not ASCII. The broker's reason has at most 255 bytes, and also names the virtual host and
# the user. If RabbitMQ 4 must cut a longer name there, it ends the connection with INTERNAL_ERROR.
MAX_EXCHANGE_BYTES = 127


class Router:
    """Finds the address of a row. The row's own exchange and routing key each take precedence over the route's."""

    def __init__(self, routes: Sequence[Route], default_exchange: str, *, allowed_exchanges: str = "*") -> None:
        default = Route(exchange=default_exchange, routing_key=DEFAULT_ROUTING_KEY)
        self._routes = (*routes, default)
        self._allowed = [re.compile(translate(pattern.strip())) for pattern in allowed_exchanges.split(",")]
        self._matched: dict[tuple[bytes, bytes], Route] = {}
        self.own_exchanges = {route.exchange.encode() for route in self._routes}
        # Whether rows of one kind may differ in their address.
        self.uses_aggregate_id = any("{aggregate_id}" in route.routing_key for route in routes)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        broker = settings.broker
        return cls(settings.routes, broker.exchange, allowed_exchanges=broker.allowed_exchanges)

    def allowed_address(self, row: Row) -> Address:
        """Return the address of the row, if the row may be sent there.

        Raises:
            UnsendableError: `broker.allowed_exchanges` does not allow the row's exchange, or its name is too long to
                ask a broker for it safely.
        """
        if row.exchange is not None:
            self.check_exchange(row.exchange)
        return self.address(row)

    def check_exchange(self, exchange: bytes) -> None:
        """Check that a row may name this exchange.

        Raises:
            UnsendableError: see `allowed_address`.
        """
        name = exchange.decode()
        if not any(pattern.match(name) for pattern in self._allowed):
            raise UnsendableError(f"exchange {name!r} is not among broker.allowed_exchanges")
        if len(exchange) > MAX_EXCHANGE_BYTES and not exchange.isascii():
            raise UnsendableError(
                f"an exchange name of {len(exchange)} bytes that are not all ASCII is longer than {MAX_EXCHANGE_BYTES}"
            )

    def address(self, row: Row) -> Address:
        if row.exchange is not None and row.routing_key is not None:
            return Address(row.exchange, row.routing_key)
        route = self.route(row.aggregate_type, row.event_type)
        exchange = row.exchange if row.exchange is not None else route.exchange.encode()
        return Address(exchange, row.routing_key if row.routing_key is not None else _fill(route.routing_key, row))

    def address_of_kind(
        self, exchange: str | None, routing_key: str | None, aggregate_type: str, event_type: str
    ) -> tuple[str, str]:
        """Return exchange and routing key of the rows of a kind; `{aggregate_id}` stays where rows differ by it."""
        route = self.route(aggregate_type.encode(), event_type.encode())
        values = {b"{event_type}": event_type.encode(), b"{aggregate_type}": aggregate_type.encode()}
        template = PLACEHOLDER.sub(lambda found: values.get(found[0], found[0]), route.routing_key.encode())
        return (
            route.exchange if exchange is None else exchange,
            template.decode() if routing_key is None else routing_key,
        )

    def unroutable(self, row: Row) -> Unroutable:
        """Return what becomes of the row when no queue is bound for its address."""
        return self.route(row.aggregate_type, row.event_type).unroutable

    def cloudevents(self, row: Row) -> CloudEvents:
        """Return how the row's message is a CloudEvent."""
        return self.route(row.aggregate_type, row.event_type).cloudevents

    def route(self, aggregate_type: bytes, event_type: bytes) -> Route:
        """Return the route of the rows of a kind; it has the address of those that name no address."""
        kind = (aggregate_type, event_type)
        route = self._matched.get(kind)
        if route is None:
            if len(self._matched) >= ROUTES_CACHED:
                self._matched.clear()
            route = next(route for route in self._routes if _takes(route, aggregate_type.decode(), event_type.decode()))
            self._matched[kind] = route
        return route


def _takes(route: Route, aggregate_type: str, event_type: str) -> bool:
    return fnmatchcase(event_type, route.event_type) and fnmatchcase(aggregate_type, route.aggregate_type)


def _fill(template: str, row: Row) -> bytes:
    # One pass over the template: braces in a type are data, never a placeholder.
    values = {
        b"{event_type}": row.event_type,
        b"{aggregate_type}": row.aggregate_type,
        b"{aggregate_id}": row.aggregate_id or b"",
    }
    return PLACEHOLDER.sub(lambda found: values[found[0]], template.encode())
