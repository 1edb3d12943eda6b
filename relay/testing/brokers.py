"""A virtual host of RabbitMQ for each test."""

import json
import secrets
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from relay.errors import BrokerUnavailableError, ConfigurationError, importing

if TYPE_CHECKING:
    from yarl import URL

PORT = 15672  # of the management plugin
TIMEOUT = 20.0  # seconds for one request
EVERYTHING = {"configure": ".*", "write": ".*", "read": ".*"}


@contextmanager
def virtual_host(broker_url: str, management_url: str | None = None) -> Iterator[str]:
    """Yield the AMQP URL of a fresh virtual host, which is deleted at the end with its queues.

    Args:
        broker_url: of any virtual host of the server; its user is an administrator.
        management_url: of the server's management plugin; without it, port 15672 of the same host.
    Raises:
        BrokerUnavailableError: the management plugin does not answer.
        ConfigurationError: it refuses the user, or the URL is not AMQP's.
    """
    url = _read(broker_url)
    user, password = url.user or "guest", url.password or "guest"
    api = f"{(management_url or f'http://{url.host}:{PORT}').rstrip('/')}/api"
    token = b64encode(f"{user}:{password}".encode()).decode()
    name = f"outbox_test_{secrets.token_hex(8)}"

    def ask(method: str, path: str, body: object = None) -> None:
        headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
        request = Request(f"{api}/{path}", json.dumps(body).encode() if body else None, headers, method=method)  # noqa: S310
        try:
            with urlopen(request, timeout=TIMEOUT):  # noqa: S310 - the test's own configuration names it
                pass
        except HTTPError as error:
            with error:
                refused = error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            if refused:
                problem = f"the management plugin at {api} refuses {user!r}: it takes a user with the tag administrator"
                raise ConfigurationError(problem) from None
            raise BrokerUnavailableError(f"{method} {api}/{path}: {error.code} {error.reason}") from None
        except (URLError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
            problem = f"the management plugin does not answer at {api} ({reason})"
            remedy = "`rabbitmq-plugins enable rabbitmq_management`"
            if management_url is None:
                remedy += (
                    ", or say where it is: management_url, which the fixtures take from OUTBOX_TEST_MANAGEMENT_URL"
                )
            raise BrokerUnavailableError(f"{problem}: {remedy}") from None

    ask("PUT", f"vhosts/{name}")
    try:
        ask("PUT", f"permissions/{name}/{quote(user, safe='')}", EVERYTHING)
        yield str(url.with_path(f"/{name}"))
    finally:
        ask("DELETE", f"vhosts/{name}")


def _read(broker_url: str) -> "URL":
    with importing("testing"):
        from yarl import URL  # noqa: PLC0415

    try:
        url = URL(broker_url)
    except ValueError:  # its words may show the URL, with the password
        url = URL()
    if url.scheme not in {"amqp", "amqps"} or not url.host:
        takes = "amqp://user:password@host:5672/vhost"
        raise ConfigurationError(f"broker_url (the fixtures take it from OUTBOX_TEST_BROKER_URL) takes a URL, {takes}")
    return url
