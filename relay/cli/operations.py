"""Where a command does what it does: on the servers of the settings, or by a console that --server names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from cyclopts import Parameter

from relay.cli.options import BrokerOptions, DatabaseOptions, Options
from relay.config.loading import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from relay.config.settings import LogSettings
from relay.errors import UsageError, importing

if TYPE_CHECKING:
    from relay.jobs.job import Job
    from relay.operate.operation import Asked, Given, Operation

Server = Annotated[
    str | None,
    Parameter(help=f"URL of a console that does it; its token is in {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}."),
]


class Operations(Protocol):
    """Does operations: on the servers of the settings (local.py), or by a console (remote.py).

    Both raise the errors of `relay.errors`, with the same words.
    """

    def do(self, operation: "Operation[Asked, Given]", asked: "Asked", *, by: str = "") -> "Given":
        """Return what the operation gives. A console knows by the token who asks: `by` is not sent."""

    def finish(
        self, operation: "Operation[Asked, Given]", asked: "Asked", *, by: str, show: "Callable[[Job], None]"
    ) -> "tuple[Given, Job]":
        """Return what the operation has ordered, and its job when that has ended, or is paused.

        Args:
            show: called with the job as it goes on.
        """


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDatabaseOptions(DatabaseOptions):
    """Where the database or the console is."""

    server: Server = None

    def operations(self) -> Operations:
        return _operations(self, self.server)

    def log_settings(self) -> LogSettings:
        return _log_settings(self, self.server)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions(Options):
    """Where the database and the broker are, or the console."""

    server: Server = None

    def operations(self) -> Operations:
        return _operations(self, self.server)

    def log_settings(self) -> LogSettings:
        return _log_settings(self, self.server)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBrokerOptions(BrokerOptions):
    """Where the broker or the console is."""

    server: Server = None

    def operations(self) -> Operations:
        return _operations(self, self.server)


def _operations(options: DatabaseOptions | BrokerOptions, server: str | None) -> Operations:
    """Return the operations of the console, else those on the servers of the settings.

    Raises:
        UsageError: there is no token, the URL must not get it, or both a console and a server are named.
    """
    if server is None:
        from relay.cli.local import LocalOperations  # noqa: PLC0415  (a console may do it)

        return LocalOperations(options.load())
    if options != type(options)(server=server):  # type: ignore[call-arg]
        raise UsageError("--server takes no other flag that says where the servers are: the console knows them")
    with importing("console"):
        from relay.cli.remote import RemoteOperations  # noqa: PLC0415
        from relay.cli.server import check_server, read_token  # noqa: PLC0415

    check_server(server)
    return RemoteOperations(server, read_token())


def _log_settings(options: DatabaseOptions, server: str | None) -> LogSettings:
    return options.load().settings.log if server is None else LogSettings()


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
