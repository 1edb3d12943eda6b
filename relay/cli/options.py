"""Flags that several commands take."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

from cyclopts import Parameter, Token, validators
from pydantic import SecretStr, ValidationError

from relay.config.durations import DURATIONS, seconds_of
from relay.config.loading import OPERATOR_VARIABLE, Loaded, load
from relay.config.settings import DatabaseSettings
from relay.errors import UsageError


def _seconds(_: object, tokens: Sequence[Token]) -> float:
    """Return what a flag says in seconds, or as a length of time."""
    text = tokens[0].value
    try:
        return float(str(seconds_of(text)))
    except ValueError:
        raise ValueError(f"it takes seconds, or a length of time such as {DURATIONS}; not {text!r}") from None


Output = Annotated[
    Literal["text", "json"],
    Parameter(name=["--output", "-o"], help="A table for people (tab-separated in a pipe), or JSON."),
]

ConfigFile = Annotated[Path | None, Parameter(help="Path of relay.toml, in place of RELAY_CONFIG.")]
BrokerUrl = Annotated[
    str | None, Parameter(help="In place of RELAY_BROKER_URL; others on this machine can see its password.")
]
By = Annotated[
    str | None,
    Parameter(
        env_var=OPERATOR_VARIABLE,
        help=f"Who does it, for the audit; else {OPERATOR_VARIABLE}, else the system's user and host.",
    ),
]
DryRun = Annotated[bool, Parameter(help="Change nothing; print the exact count.")]
FailureGroup = Annotated[
    str | None, Parameter(name="--group", help="Of this failure group, as `relay failures list` names it.")
]
Flags = Parameter(name="*")  # each field of a class is a flag
Most = Annotated[int, Parameter(help="At most so many.", validator=validators.Number(gte=1))]
MessageIds = Annotated[
    UUID, Parameter(name="MESSAGE-ID", help="Message ids; all that the filters select unless given.")
]
LENGTH = "DURATION"  # what the helps call a length of time
Seconds = Annotated[float, Parameter(converter=_seconds, metavar=LENGTH, show_default=lambda seconds: f"{seconds:g}s")]
Length = Annotated[str, Parameter(metavar=LENGTH)]


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
class InboxOptions:
    """Where the inbox is."""

    url: Annotated[
        str | None,
        Parameter(
            name="--inbox", help="URL of the inbox's database, else that of the outbox; others can see its password."
        ),
    ] = None
    schema: Annotated[str | None, Parameter(name="--inbox-schema", help="Its schema, in place of database.schema.")] = (
        None
    )

    def settings(self, database: DatabaseSettings) -> DatabaseSettings:
        """Return the settings of the inbox's database: those of `database`, where nothing else is said.

        Raises:
            UsageError: a flag has a value that cannot be.
        """
        given = {"url": self.url and SecretStr(self.url), "schema_name": self.schema}
        said = {name: value for name, value in given.items() if value is not None}
        try:
            return DatabaseSettings.model_validate({**database.model_dump(exclude_unset=True), **said})
        except ValidationError as error:
            wrong = {place for each in error.errors() for place in each["loc"]}
            if "url" in wrong:
                raise UsageError("--inbox takes a libpq URL, postgresql://user:password@host:5432/database") from None
            raise UsageError(
                "--inbox-schema takes at most 40 lower-case letters, digits and _, no digit first"
            ) from None


def check_choice(*, is_filtered: bool, is_all: bool, choices: str) -> None:
    """Check that a command was told what to change: by ids and filters, or all with --all.

    Args:
        choices: what the operator can give, for the error.

    Raises:
        UsageError: neither was given, or both.
    """
    if not is_filtered and not is_all:
        raise UsageError(f"give {choices}")
    if is_filtered and is_all:
        raise UsageError("--all and a filter exclude each other")


def check_address(exchange: str | None, routing_key: str | None) -> None:
    """Check that AMQP can carry what --to-exchange and --routing-key say.

    Raises:
        UsageError: one of them is too long.
    """
    for flag, text in (("--to-exchange", exchange), ("--routing-key", routing_key)):
        if text is not None and len(text.encode()) > 255:
            raise UsageError(f"{flag} is longer than the 255 bytes that AMQP allows")
