"""What can be configured: one frozen model a section of relay.toml.

How the values are found (flags, environment, secret files, relay.toml, defaults) is `relay.configuration`.
"""

from enum import StrEnum
from socket import gethostname
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints

Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]{0,39}$")]
ShortString = Annotated[str, StringConstraints(max_length=255)]
Seconds = Annotated[float, Field(gt=0)]


class Ordering(StrEnum):
    """What is kept in order on the way to the broker."""

    KEY = "key"  # nothing of a key is sent before its predecessor is settled
    PIPELINED = "pipelined"  # a lane goes out in id order, several batches in flight
    NONE = "none"  # as it comes


class KeyPolicy(StrEnum):
    """What happens to the later rows of a key whose row was parked."""

    HOLD = "hold"  # they wait, parked behind it
    SKIP = "skip"  # they go on


class Wire(StrEnum):
    """How a message is handed to the AMQP library."""

    FRAMES = "frames"  # encoded here, one write for many messages
    PUBLISH = "publish"  # the library's documented basic_publish, one call a message


class Section(BaseModel):
    """A table of relay.toml: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatabaseSettings(Section):
    """`[database]`: where the outbox is."""

    url: SecretStr = SecretStr("postgresql://localhost/postgres")
    schema_name: Identifier = Field("outbox", alias="schema")
    connect_timeout: Seconds = 5.0
    command_timeout: Seconds = 30.0  # no answer to a statement within this: the connection is lost


class BrokerSettings(Section):
    """`[broker]`: where the messages go."""

    url: SecretStr = SecretStr("amqp://guest:guest@localhost/")  # several separated by commas
    exchange: ShortString = "outbox"  # for rows that name none and that no route takes
    declare: bool = True  # declare that exchange at start when it is missing
    app_id: ShortString = "outbox-relay"
    connect_timeout: Seconds = 5.0
    confirm_timeout: Seconds = 30.0  # no confirm within this: outcome unknown, sent again
    heartbeat: Annotated[int, Field(ge=1, le=60)] = 5


class RelaySettings(Section):
    """`[relay]`: how rows are carried."""

    node: ShortString = Field(default_factory=gethostname)
    ordering: Ordering = Ordering.KEY
    key_policy: KeyPolicy = KeyPolicy.HOLD
    wire: Wire = Wire.FRAMES
    max_in_flight: Annotated[int, Field(ge=1, le=65535)] = 1200  # messages sent and not yet confirmed
    max_window_rows: Annotated[int, Field(ge=1)] = 8000  # rows read and not yet settled
    max_window_bytes: Annotated[int, Field(ge=65536)] = 64 * 1024 * 1024
    max_message_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 8
    backoff_initial: Seconds = 0.5
    backoff_max: Seconds = 60.0
    poll_interval: Seconds = 1.0  # beneath the wake-up, when the relay sleeps
    sweep_interval: Seconds = 10.0
    heartbeat_interval: Seconds = 1.0
    drain_timeout: Seconds = 8.0


class Route(Section):
    """`[[routes]]`: where rows that name no exchange go; the first that matches decides.

    `event_type` and `aggregate_type` are shell patterns. `routing_key` may contain `{aggregate_type}`,
    `{aggregate_id}` and `{event_type}`.
    """

    event_type: str = "*"
    aggregate_type: str = "*"
    exchange: ShortString
    routing_key: ShortString = "{aggregate_type}.{event_type}"


class LogFormat(StrEnum):
    """How log events are written."""

    AUTO = "auto"  # console on a terminal, else json
    CONSOLE = "console"
    JSON = "json"


class LogSettings(Section):
    """`[log]`."""

    level: Annotated[str, StringConstraints(pattern="^(debug|info|warning|error)$")] = "info"
    format: LogFormat = LogFormat.AUTO


class Settings(Section):
    """Everything that `relay` can be told."""

    database: DatabaseSettings = DatabaseSettings()
    broker: BrokerSettings = BrokerSettings()
    relay: RelaySettings = RelaySettings()
    routes: tuple[Route, ...] = ()
    log: LogSettings = LogSettings()
