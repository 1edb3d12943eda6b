"""Where a command does what it does: on the servers of the settings, or by a console that --server names."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from relay.cli.options import BrokerOptions, DatabaseOptions, Options
from relay.config.loading import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from relay.config.settings import LogSettings
from relay.errors import UsageError, importing

if TYPE_CHECKING:
    from relay.operations.operations import Operations
    from relay.operations.remote import RemoteOperations

Server = Annotated[
    str | None,
    Parameter(help=f"URL of a console that does it; its token is in {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}."),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDatabaseOptions(DatabaseOptions):
    """Where the database or the console is."""

    server: Server = None

    def operations(self) -> "Operations":
        return _operations(self, self.server)

    def log_settings(self) -> LogSettings:
        return _log_settings(self, self.server)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions(Options):
    """Where the database and the broker are, or the console."""

    server: Server = None

    def operations(self) -> "Operations":
        return _operations(self, self.server)

    def console(self) -> "RemoteOperations":
        """Return the operations of the console that --server names."""
        return _remote(self, self.server or "")

    def log_settings(self) -> LogSettings:
        return _log_settings(self, self.server)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBrokerOptions(BrokerOptions):
    """Where the broker or the console is."""

    server: Server = None

    def operations(self) -> "Operations":
        return _operations(self, self.server)


def _operations(options: DatabaseOptions | BrokerOptions, server: str | None) -> "Operations":
    """Return the operations of the console, else those on the servers of the settings.

    Raises:
        UsageError: there is no token, or both a console and a server of the settings are named.
    """
    if server is None:
        from relay.operations.local import LocalOperations  # noqa: PLC0415  (a console may do it)

        loaded = options.load()
        return LocalOperations(loaded.settings, loaded.file)
    return _remote(options, server)


def _remote(options: DatabaseOptions | BrokerOptions, server: str) -> "RemoteOperations":
    if options != type(options)(server=server):  # type: ignore[call-arg]
        raise UsageError("--server takes no other flag that says where the servers are: the console knows them")
    with importing("console"):
        from relay.operations.remote import RemoteOperations  # noqa: PLC0415

    return RemoteOperations(server, _token())


def _log_settings(options: DatabaseOptions, server: str | None) -> LogSettings:
    return options.load().settings.log if server is None else LogSettings()


def _token() -> str:
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token
    if file := os.environ.get(TOKEN_FILE_VARIABLE):
        try:
            return Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{TOKEN_FILE_VARIABLE} = {file} cannot be read: {error}") from error
    raise UsageError(
        f"--server needs a token, in {TOKEN_VARIABLE} or a file that {TOKEN_FILE_VARIABLE} names:"
        " `relay console token add` makes one"
    )


def in_place(arguments: list[str]) -> list[str]:
    """Return the arguments with a --server that stands before the command behind it, where commands take it."""
    if arguments[:1] == ["--server"]:
        moved, rest = arguments[:2], arguments[2:]
    elif arguments and arguments[0].startswith("--server="):
        moved, rest = arguments[:1], arguments[1:]
    else:
        return arguments
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *moved, *rest[end:]]
