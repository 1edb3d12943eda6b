"""What can be configured: one frozen model a section of relay.toml.

How the values are found (flags, environment, secret files, relay.toml, defaults) is `relay.config.loading`.
The text below a key is its description in docs/configuration.md and config/relay.toml.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from ipaddress import ip_network
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from relay.config.durations import parse_duration, seconds_of
from relay.config.secret import SecretSource
from relay.config.sections import Section, ShortString, Takes, short
from relay.config.topology import TopologySettings
from relay.config.urls import amqp_urls, libpq_parameters
from relay.errors import ConfigurationError, importing
from relay.runtime.memory import memory_limit, window_within
from relay.runtime.scrub import remember

with importing("publisher"):
    from pydantic import (
        AfterValidator,
        BeforeValidator,
        Field,
        SecretStr,
        StringConstraints,
        ValidationError,
        ValidationInfo,
    )

Url = str | SecretStr  # as applications give it; also a SecretSource, which is read again

MOST_DAYS = 99_999
LISTEN_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
# As browsers write it, and a path without a slash at its end.
ORIGIN = re.compile(r"(https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?)((?:/(?!\.+(?:/|$))[A-Za-z0-9._~-]+)*)")

# No login before the host: that is what the token is for.
WEBHOOK = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-\"$-~]*)?")

# Of RFC 3986: it begins with a scheme, or has no colon before its first slash. No login before a host.
_URI = r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
URI_REFERENCE = re.compile(rf"(?!.*//[^/]*@)(?:[A-Za-z][A-Za-z0-9+.-]*:|(?![^/?#]*:)){_URI}")


def _libpq_url(url: SecretStr) -> SecretStr:
    return _readable(url, libpq_parameters)


def _amqp_urls(urls: SecretStr) -> SecretStr:
    return _readable(urls, amqp_urls)


def _readable(url: SecretStr, read: Callable[[str], object]) -> SecretStr:
    read(url.get_secret_value())
    if isinstance(url, SecretSource):
        url.accept_only(read)
    return url


def days_kept(retention: str) -> int | None:
    """Return the days of `relay.retention` or `relay.inbox_retention`; None when nothing is dropped.

    Raises:
        ValueError: it is neither so many days nor "off".
    """
    if retention == "off":
        return None
    kept = parse_duration(retention)
    if kept != timedelta(days=kept.days) or not 1 <= kept.days <= MOST_DAYS:
        raise ValueError
    return kept.days


def _retention(text: str) -> str:
    days_kept(text)
    return text


def _not_shorter(inbox_retention: str, info: ValidationInfo) -> str:
    remembered, kept = days_kept(inbox_retention), days_kept(info.data.get("retention", "1 day"))
    if remembered is not None and (kept is None or remembered < kept):
        raise ValueError
    return inbox_retention


def _listen_address(address: str) -> str:
    if address:
        host, _, port = address.rpartition(":")
        if not LISTEN_HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError
    return address


def _origin(origin: str) -> str:
    if origin and not ORIGIN.fullmatch(origin):
        raise ValueError
    return origin


def _webhook_url(url: SecretStr) -> SecretStr:
    return _readable(url, _webhook)


def _webhook(url: str) -> None:
    """Raise ValueError, without a part of the URL: its path is often the secret that lets one post there."""
    remember(url)
    if url and not WEBHOOK.fullmatch(url):
        raise ValueError


def _uri_reference(reference: str) -> str:
    if len(reference) > 255 or not URI_REFERENCE.fullmatch(reference):
        raise ValueError
    return reference


def _issuer(issuer: str) -> str:
    """Let pass a URL by https; one of this host may come by http, which nobody else can read."""
    if issuer and not re.match(r"https://[^/?#]|http://(localhost|127\.0\.0\.1|\[::1\])[:/]", issuer):
        raise ValueError
    return issuer


def _networks(networks: str) -> str:
    for network in filter(None, map(str.strip, networks.split(","))):
        ip_network(network)
    return networks


def _remembered(secret: SecretStr) -> SecretStr:
    remember(secret.get_secret_value())
    return secret


def _url_or_nothing(url: SecretStr) -> SecretStr:
    return _libpq_url(url) if url.get_secret_value() else url


DatabaseUrl = Annotated[
    SecretStr,
    AfterValidator(_libpq_url),
    Takes("a libpq URL, postgresql://user:password@host:5432/database"),
]
InboxUrl = Annotated[SecretStr, AfterValidator(_url_or_nothing), Takes("a libpq URL, or nothing")]
WebhookUrl = Annotated[
    SecretStr, AfterValidator(_webhook_url), Takes("an https or http URL without a login, or nothing")
]
BrokerUrl = Annotated[
    SecretStr,
    AfterValidator(_amqp_urls),
    Takes("amqp:// or amqps:// URLs, amqp://user:password@host:5672/vhost, several separated by commas"),
]
Identifier = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z_][a-z0-9_]{0,39}$"),
    Takes("at most 40 lower-case letters, digits and _, no digit first"),
]
NodeName = Annotated[str, StringConstraints(min_length=1), AfterValidator(short), Takes("text of 1 to 255 bytes")]
Retention = Annotated[
    str, AfterValidator(_retention), Takes('days as in "14 days" or "14d", from 1 to 99999, or "off"')
]
InboxRetention = Annotated[
    str,
    AfterValidator(_retention),
    AfterValidator(_not_shorter),
    Takes('days as in "30 days" or "30d", no fewer than those of relay.retention, or "off"'),
]
ListenAddress = Annotated[
    str, AfterValidator(_listen_address), Takes("address:port, 0.0.0.0:8080 or [::]:8080, or nothing")
]
ConsoleAddress = Annotated[
    str, StringConstraints(min_length=1), AfterValidator(_listen_address), Takes("address:port, as in 127.0.0.1:8420")
]
Environment = Annotated[
    str,
    StringConstraints(max_length=40, pattern=r"^[^\u0000-\u001f\u007f-\u009f]*$"),
    Takes("text of at most 40 characters, or nothing"),
]
Origin = Annotated[
    str,
    AfterValidator(_origin),
    Takes("https://host:port or https://host/path, with no / at its end, or nothing"),
]
Issuer = Annotated[str, AfterValidator(_issuer), Takes("an https URL, or nothing")]
UriReference = Annotated[str, AfterValidator(_uri_reference), Takes("a URI or a path, without a login, or nothing")]
Networks = Annotated[
    str, AfterValidator(_networks), Takes("addresses and networks separated by commas, as in 10.0.0.0/8, or nothing")
]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,100}$"), Takes("the name of an HTTP header")]
Groups = Annotated[str, Takes("names of groups separated by commas, or nothing")]
Text = Annotated[str, Takes("text, or nothing")]
Secret = Annotated[SecretStr, AfterValidator(_remembered), Takes("text, or nothing")]
Pattern = Annotated[str, StringConstraints(min_length=1), Takes("a shell pattern")]
Patterns = Annotated[str, Takes('shell patterns separated by commas; the empty one is the default exchange `""`')]
Seconds = Annotated[
    float,
    BeforeValidator(seconds_of),
    Field(gt=0, allow_inf_nan=False),
    Takes('seconds, above 0, or as in "30s"'),
]


def _window(earlier: dict[str, Any]) -> int:
    """Return the default of `relay.max_window_bytes`, from the keys before it."""
    return window_within(memory_limit().size, earlier["max_message_bytes"])


class Ordering(StrEnum):
    """What is kept in order on the way to the broker."""

    KEY = "key"  # nothing of a key is sent before its predecessor is settled
    PIPELINED = "pipelined"  # a lane goes out in id order, several batches in flight


class KeyPolicy(StrEnum):
    """What happens to the later rows of a key whose row was parked."""

    HOLD = "hold"  # they wait, parked behind it
    SKIP = "skip"  # they go on


class KeyScope(StrEnum):
    """Which rows have one ordering key."""

    ALL = "all"  # those of one aggregate_type and aggregate_id
    ROLE = "role"  # of these, those that one role of the database wrote


class Unroutable(StrEnum):
    """What becomes of a row for which the broker has no queue."""

    QUARANTINE = "quarantine"  # it waits until a queue is bound
    SENT = "sent"  # it is marked sent
    DISCARD = "discard"  # it is kept as discarded


class CloudEvents(StrEnum):
    """How a message is a CloudEvent."""

    OFF = "off"  # it is an ordinary message
    BINARY = "binary"  # by headers
    STRUCTURED = "structured"  # by an envelope, which is the body


class Authentication(StrEnum):
    """How the console knows who uses it."""

    NONE = "none"  # who has the token of the start is an owner
    PASSWORD = "password"  # noqa: S105  (a name and a password of the file console.users)
    PROXY = "proxy"  # a proxy says it in headers
    OIDC = "oidc"  # an OpenID Connect provider says it


class LogFormat(StrEnum):
    """How log events are written."""

    AUTO = "auto"  # console on a terminal, else json
    CONSOLE = "console"
    JSON = "json"


class DatabaseSettings(Section):
    """`[database]`: where the outbox is."""

    url: DatabaseUrl = SecretStr("")  # without one nothing connects: a server that was not named is another's
    """PostgreSQL; several hosts are tried in turn (docs/failover.md)"""
    schema_name: Identifier = Field("outbox", alias="schema")
    """schema of the outbox tables"""
    connect_timeout: Seconds = 5.0
    """for a connection to each host"""
    command_timeout: Seconds = 30.0
    """a statement without an answer within this loses the connection"""

    if TYPE_CHECKING:  # the type of the field does not tell that pydantic takes text for it

        def __init__(self, *, url: Url = ..., **others: Any) -> None: ...


class BrokerSettings(Section):
    """`[broker]`: where the messages go."""

    url: BrokerUrl = SecretStr("")
    """RabbitMQ; several URLs are tried in turn, and each address of a name"""
    exchange: ShortString = "outbox"
    """for rows that name no exchange and match no route"""
    allowed_exchanges: Patterns = "*"
    """exchanges that rows may name; other rows are parked"""
    sender_selected_distribution: bool = False
    """rows may name more routing keys in the headers `CC` and `BCC`; else they are parked"""
    declare: bool = True
    """at start, declare that exchange (topic, durable) and what `[topology]` lists, if missing"""
    app_id: ShortString = "outbox-relay"
    """the property `app_id` of each message"""
    cloudevents_source: UriReference = ""
    """`source` of each CloudEvent; empty: `/` and `app_id`"""
    cloudevents_prefix: Literal["ce-", "cloudEvents_", "cloudEvents:"] = "ce-"
    """of the headers of a binary CloudEvent: `ce-`, `cloudEvents_` or `cloudEvents:` (docs/cloudevents.md)"""
    connect_timeout: Seconds = 5.0
    """for resolving a name, and for a connection to each address"""
    confirm_timeout: Seconds = 30.0
    """a message without a confirm within this is sent again"""
    heartbeat: Annotated[
        int, BeforeValidator(seconds_of), Field(ge=1, le=60), Takes('whole seconds from 1 to 60, or as in "30s"')
    ] = 5
    """the relay leaves a broker that is silent for two of these"""

    if TYPE_CHECKING:  # the type of the field does not tell that pydantic takes text for it

        def __init__(self, *, url: Url = ..., **others: Any) -> None: ...


Server = TypeVar("Server", DatabaseSettings, BrokerSettings)


def settings_of(kind: type[Server], given: Server | Url) -> Server:
    """Return the settings of a server, for which its URL alone may stand.

    Raises:
        ConfigurationError: it is neither settings nor a URL of such a server.
    """
    if isinstance(given, kind):
        return given
    try:
        return kind.model_validate({"url": given})
    except ValidationError as error:
        (found,) = error.errors()
        reason = str(found.get("ctx", {}).get("error", ""))
        takes = next(each.words for each in kind.model_fields["url"].metadata if isinstance(each, Takes))
        raise ConfigurationError(f"{kind.__name__}(url=...): {reason or f'it takes {takes}'}") from None


class RelaySettings(Section):
    """`[relay]`: how rows are carried."""

    node: NodeName = Field(default_factory=gethostname)
    """unique name of this node"""
    ordering: Ordering = Ordering.KEY
    """key: rows of a key; pipelined: rows of a lane, until one is refused"""
    key_policy: KeyPolicy = KeyPolicy.HOLD
    """behind a row that is parked, backs off or has no route, later rows of its key wait (hold) or go on (skip)"""
    key_scope: KeyScope = KeyScope.ALL
    """all: rows of all roles with one type and id have one key; role: those of each role (docs/database.md)"""
    max_in_flight: Annotated[int, Field(ge=1, le=65535)] = 800
    """messages sent, not yet confirmed; a third while live rows come next to a backlog"""
    max_window_rows: Annotated[int, Field(ge=1)] = 2000
    """rows read and not yet settled"""
    max_message_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    """a larger payload is parked, unread"""
    max_window_bytes: Annotated[int, Field(ge=65536)] = Field(default_factory=_window)
    """bytes read and not yet settled. A larger row goes alone"""
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 8
    """a row is parked after this many refusals; outages do not count"""
    backoff_initial: Seconds = 0.5
    """wait after a row's first refusal; doubles with each"""
    backoff_max: Seconds = 60.0
    """longest wait between two attempts"""
    poll_interval: Seconds = 1.0
    """how often a sleeping relay looks for rows"""
    sweep_interval: Seconds = 10.0
    """how often it looks for rows that became visible behind higher ids"""
    heartbeat_interval: Seconds = 1.0
    """how often the node renews its row in the table `node`"""
    node_timeout: Annotated[
        float,
        BeforeValidator(seconds_of),
        Field(ge=1, allow_inf_nan=False),
        Takes('seconds, at least 1, or as in "30s"'),
    ] = 10.0
    """without a heartbeat this long, another node ends its session and takes its lanes"""
    standby: bool = False
    """take lanes only while no other node can deliver, standbys aside"""
    stall_after: Seconds = 5.0
    """`stalled` and not ready after this long without a settled message while some wait, or with a silent database"""
    start_timeout: Seconds = 60.0
    """how long the start waits for database and broker"""
    drain_timeout: Seconds = 8.0
    """after SIGTERM, to confirm and mark what is in flight; the process ends within 2 s more"""
    pools: bool = True
    """whether it may be the master of pools (docs/partitioned-consumers.md)"""
    retention: Retention = "14 days"
    """days of sent rows are dropped after this (docs/database.md)"""
    retention_waits_for_archive: bool = False
    """sent rows are dropped only once they are archived (docs/archive.md)"""
    inbox_retention: InboxRetention = "30 days"
    """an inbox forgets a message this long after the day it was written. See docs/consumer.md"""
    batch_retention: Retention = "off"
    """names of Spark's batches are forgotten after this (docs/database.md)"""

    @property
    def retention_days(self) -> int | None:
        return days_kept(self.retention)

    @property
    def batch_retention_days(self) -> int | None:
        return days_kept(self.batch_retention)

    @property
    def inbox_retention_days(self) -> int | None:
        """As many as `retention_days`, at least: a replay of rows that are kept must find what was applied of them."""
        kept, remembered = self.retention_days, days_kept(self.inbox_retention)
        return None if kept is None or remembered is None else max(kept, remembered)


class Route(Section):
    """`[[routes]]`: where rows that name no exchange go; the first that matches decides."""

    event_type: Pattern = "*"
    """a shell pattern"""
    aggregate_type: Pattern = "*"
    """a shell pattern"""
    exchange: ShortString
    """an exchange that exists; `""` is the default exchange"""
    routing_key: ShortString = "{aggregate_type}.{event_type}"
    """may contain `{aggregate_type}`, `{aggregate_id}` and `{event_type}`"""
    unroutable: Unroutable = Unroutable.QUARANTINE
    """rows of these types for which no queue is bound: they wait in quarantine, are marked sent, or are discarded"""
    cloudevents: CloudEvents = CloudEvents.OFF
    """whether they go out as CloudEvents (docs/cloudevents.md), by headers (binary) or in an envelope (structured)"""


class HttpSettings(Section):
    """`[http]`: where a running relay answers probes and Prometheus."""

    listen: ListenAddress = ""
    """of `/livez`, `/readyz` and `/metrics`; empty: off"""


class ConsoleSettings(Section):
    """`[console]`: the web console (docs/console.md)."""

    listen: ConsoleAddress = "127.0.0.1:8420"
    """of the pages; beyond loopback only with authentication"""
    environment: Environment = ""
    """what the pages call this environment, as in `production`"""
    origin: Origin = ""
    """what browsers open, `https://relay.example.org` or `https://example.org/relay`; empty: the address of `listen`"""
    authentication: Authentication = Authentication.NONE
    """none: a token that the start prints; password: a file; proxy: headers; oidc: OpenID Connect"""
    webhook_url: WebhookUrl = SecretStr("")
    """gets a POST when the verdict changes (docs/webhook.md)"""
    webhook_token: Secret = SecretStr("")
    """goes there as `Authorization: Bearer`"""
    webhook_after: Seconds = 10.0
    """a change is sent once it has held for this"""
    read_only: bool = False
    """nobody can change anything by the console"""
    statement_timeout: Seconds = 2.0
    """PostgreSQL ends a statement of the console after this"""
    inbox_url: InboxUrl = SecretStr("")
    """PostgreSQL of the consumers' inbox, if it is not the outbox's: Messages and Reconcile look there"""
    inbox_schema: Identifier = "outbox"
    """schema of the tables at `inbox_url`"""
    session_timeout: Seconds = 28800.0
    """a login ends after this"""
    users: Text = ""
    """file of names, roles and hashes of passwords; `relay console user` writes it"""
    tokens: Text = ""
    """file of names, roles and hashes of the tokens of programs; `relay console token` writes it"""
    trusted_proxies: Networks = ""
    """who may say in headers who the user is"""
    proxy_name_header: HeaderName = "X-Forwarded-User"
    """the user's name"""
    proxy_groups_header: HeaderName = "X-Forwarded-Groups"
    """the user's groups, separated by commas"""
    oidc_issuer: Issuer = ""
    """the provider, as it names itself"""
    oidc_client_id: Text = ""
    """of the console, at the provider"""
    oidc_client_secret: Secret = SecretStr("")
    """of the console, at the provider"""
    oidc_scopes: Text = "openid profile groups"
    """what the provider is asked for"""
    oidc_groups_claim: Text = "groups"
    """of the ID token, with the user's groups"""
    viewer_groups: Groups = ""
    """may see everything but what messages say"""
    operator_groups: Groups = ""
    """may reveal what messages say, retry and reroute, too"""
    owner_groups: Groups = ""
    """may discard and drop, too"""

    @property
    def base(self) -> str:
        """The path below which browsers see the console, as in `/relay`; empty where it has a host's name to itself."""
        found = ORIGIN.fullmatch(self.origin)
        return found[2] if found else ""


class LogSettings(Section):
    """`[log]`: what is said on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """the lowest level that is logged"""
    format: LogFormat = LogFormat.AUTO
    """auto: for people on a terminal, else json"""


class Settings(Section):
    """Everything that `relay` can be told."""

    database: DatabaseSettings = DatabaseSettings()
    broker: BrokerSettings = BrokerSettings()
    relay: RelaySettings = RelaySettings()
    routes: tuple[Route, ...] = ()
    """as a variable: a JSON list of tables"""
    topology: TopologySettings = TopologySettings()
    http: HttpSettings = HttpSettings()
    console: ConsoleSettings = ConsoleSettings()
    log: LogSettings = LogSettings()
