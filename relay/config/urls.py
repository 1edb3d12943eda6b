"""Read the URLs of both servers as their clients do, and refuse what can be read in two ways.

No error here repeats a part of the URL: what is taken for a port or a host may be a piece of a password.
"""

import os
import re

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from yarl import URL

from relay.config.tls import require_known_parameters
from relay.runtime.scrub import remember, remember_url

ENCODE = (
    "in a user or password write %25 for %, %40 for @, %3A for :, %2F for /, %3F for ?, %23 for #, %5B for [,"
    " %5D for ], %5C for \\"
)
SECRET_PARAMETERS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
AMQP_PORTS = {"amqp": 5672, "amqps": 5671}


def libpq_parameters(text: str) -> dict[str, str]:
    """Return libpq's parameters of a URL or of a string such as `host=... dbname=...`.

    Raises:
        ValueError: libpq cannot read it, or a person may read it in another way.
    """
    remember_url(text)
    if re.match(r"postgres(ql)?://", text):
        _refuse_ambiguous(text)
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(text).items() if value is not None}
    except ProgrammingError:  # its words repeat the URL
        given = {}
    if not given:  # libpq takes an empty string for "whatever listens on the local socket"
        raise ValueError
    for name in SECRET_PARAMETERS:
        remember(given.get(name, ""))
    if "password" not in given:
        remember(os.environ.get("PGPASSWORD", ""))
    for port in given.get("port", "").split(","):
        if port and not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"its port is no number; {ENCODE}")
    return given


def amqp_urls(text: str) -> list[URL]:
    """Return each URL of a list with commas between; a comma ends a URL only where another `amqp://` follows.

    Raises:
        ValueError: one of them is no AMQP URL, or can be read in two ways.
    """
    remember_url(text)
    return [_amqp_url(part.strip()) for part in re.split(r",\s*(?=amqps?://)", text)]


def _amqp_url(text: str) -> URL:
    scheme, _, rest = text.partition("://")
    if scheme not in AMQP_PORTS:
        raise ValueError
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    behind = rest[len(authority) :]
    if "@" in behind or "#" in behind or "," in authority.rpartition("@")[2] + behind:
        raise ValueError(f"it can be read in two ways; {ENCODE}, %2C for , in a virtual host")
    try:
        url = URL(text)
        host = url.host
    except ValueError:  # whose words may repeat a password
        raise ValueError(f"it is no URL; {ENCODE}") from None
    if not host:
        raise ValueError
    remember(url.password or "")
    remember(url.raw_password or "")
    require_known_parameters(url)
    return url


def _refuse_ambiguous(text: str) -> None:
    """Raise ValueError if an @ stands behind the host: libpq has then taken a piece of the password for it."""
    rest = text.partition("://")[2]
    user, _, behind = rest.partition("@")
    if "/" in user:  # libpq looks for a user no further than to the first slash
        behind = rest
    if "@" in behind.partition("?")[0]:
        raise ValueError(f"it can be read in two ways; {ENCODE}")
