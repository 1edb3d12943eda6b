"""Flags that several commands take."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

from cyclopts import Parameter

from relay.configuration import Loaded, load

Output = Annotated[
    Literal["text", "json"],
    Parameter(name=["--output", "-o"], help="A table for people (tab-separated in a pipe), or JSON."),
]


ConfigFile = Annotated[Path | None, Parameter(help="Path of relay.toml, in place of RELAY_CONFIG.")]
BrokerUrl = Annotated[
    str | None, Parameter(help="In place of RELAY_BROKER_URL; others on this machine can see its password.")
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseOptions:
    """Where the settings are, for a command that needs the database alone."""

    config: ConfigFile = None
    database_url: Annotated[
        str | None, Parameter(help="In place of RELAY_DATABASE_URL; others on this machine can see its password.")
    ] = None

    def load(self) -> Loaded:
        return load(config=self.config, flags={"database.url": self.database_url})


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Where the settings are, for a command that needs the broker alone."""

    config: ConfigFile = None
    broker_url: BrokerUrl = None

    def load(self) -> Loaded:
        return load(config=self.config, flags={"broker.url": self.broker_url})


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options(DatabaseOptions):
    """Where the settings are, for a command that needs the broker, too."""

    broker_url: BrokerUrl = None

    def load(self) -> Loaded:
        return load(config=self.config, flags={"database.url": self.database_url, "broker.url": self.broker_url})


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilters:
    """Which rows, by what their writer said."""

    message_ids: Annotated[
        list[UUID] | None, Parameter(name="--message-id", help="By message id; may be repeated.")
    ] = None
    aggregate_type: Annotated[str | None, Parameter(help="Of this type.")] = None
    aggregate_id: Annotated[str | None, Parameter(help="Of this key.")] = None
    event_type: Annotated[str | None, Parameter(help="Of this event.")] = None
