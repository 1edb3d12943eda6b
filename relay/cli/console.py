"""`relay console`.

The extra `console` is imported by the commands that need it: `relay completion` goes through all commands.
"""

import asyncio
import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.options import ConfigFile, Options, Output
from relay.cli.printing import print_json, print_table, say
from relay.config.loading import load
from relay.errors import UsageError, importing
from relay.observe import log

if TYPE_CHECKING:
    from relay.console.access.passwords import PasswordFile
    from relay.console.access.tokens import TokenFile

app = App(name="console", help="Serve the web console; manage its users.")
user = App(name="user", help="The users of console.users.")
app.command(user)
token = App(name="token", help="The tokens of programs, in the file console.tokens.")
app.command(token)

Roles = Literal["viewer", "operator", "owner"]
File = Annotated[Path | None, Parameter(name="--file", help="The password file, in place of console.users.")]
Name = Annotated[str, Parameter(help="As it is written at the login, and in the audit.")]


@app.default
def console(*, options: Options = Options()) -> ExitCode:
    """Serve the web console until SIGTERM or Ctrl-C; then exit with 0."""
    with importing("console"):
        from relay.console.serve import serve  # noqa: PLC0415
    loaded = options.load()
    log.set_up(loaded.settings.log)
    asyncio.run(serve(loaded.settings, loaded.file, lambda address: say(f"open {address}")))
    return ExitCode.DONE


@user.command
def add(
    name: Name,
    /,
    *,
    role: Annotated[Roles, Parameter(help="What the user may do.")] = "viewer",
    file: File = None,
    config: ConfigFile = None,
) -> ExitCode:
    """Add a user, or give one another role and password. The password is asked for, or is a line of stdin."""
    users = _file(file, config)
    users.put(name, role, _password())
    say(f"{name} may log in as {role}; sessions of that name have ended")
    return ExitCode.DONE


@user.command
def remove(name: Name, /, *, file: File = None, config: ConfigFile = None) -> ExitCode:
    """Take a user away; their sessions end at once."""
    _file(file, config).remove(name)
    say(f"{name} can no longer log in")
    return ExitCode.DONE


@user.command(name="list")
def list_users(*, file: File = None, config: ConfigFile = None, output: Output = "text") -> ExitCode:
    """List the users and their roles."""
    users = _file(file, config).users()
    if output == "json":
        print_json(users)
    else:
        print_table(("name", "role"), [(each.name, each.role) for each in users])
    return ExitCode.DONE


TokensFile = Annotated[Path | None, Parameter(name="--file", help="The file of tokens, in place of console.tokens.")]
TokenName = Annotated[str, Parameter(help="Of the program, as the audit names it.")]


@token.command(name="add")
def add_token(
    name: TokenName,
    /,
    *,
    role: Annotated[Roles, Parameter(help="What the program may do.")] = "viewer",
    file: TokensFile = None,
    config: ConfigFile = None,
) -> ExitCode:
    """Make a token, and print it this once: it takes the place of an earlier one of this name."""
    say(_tokens(file, config).add(name, role))
    return ExitCode.DONE


@token.command(name="remove")
def remove_token(name: TokenName, /, *, file: TokensFile = None, config: ConfigFile = None) -> ExitCode:
    """Take a token away; it counts no longer."""
    _tokens(file, config).remove(name)
    say(f"the token of {name} counts no longer")
    return ExitCode.DONE


@token.command(name="list")
def list_tokens(*, file: TokensFile = None, config: ConfigFile = None, output: Output = "text") -> ExitCode:
    """List the names and roles of the tokens."""
    found = _tokens(file, config).identities()
    if output == "json":
        print_json(found)
    else:
        print_table(("name", "role"), [(each.name, each.role) for each in found])
    return ExitCode.DONE


def _tokens(file: Path | None, config: Path | None) -> "TokenFile":
    with importing("console"):
        from relay.console.access.tokens import TokenFile  # noqa: PLC0415
    return TokenFile(file or load(config=config).settings.console.tokens)


def _file(file: Path | None, config: Path | None) -> "PasswordFile":
    with importing("console"):
        from relay.console.access.passwords import PasswordFile  # noqa: PLC0415
    path = file or load(config=config).settings.console.users
    if not path:
        raise UsageError("name the password file: --file, or console.users (RELAY_CONSOLE_USERS)")
    return PasswordFile(path)


def _password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass("Password: ")
    if getpass("Again: ") != password:
        raise UsageError("the two passwords differ: nothing was changed")
    return password
