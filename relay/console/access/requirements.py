"""What each kind of authentication needs before the console listens."""

from urllib.parse import urlsplit

from relay.config.settings import Authentication, ConsoleSettings
from relay.console.access.passwords import PasswordFile
from relay.errors import ConfigurationError
from relay.runtime.listen import is_loopback

GROUPS = ("viewer_groups", "operator_groups", "owner_groups")


def check_access(console: ConsoleSettings) -> None:
    """See that the console lets in authenticated users only.

    Raises:
        ConfigurationError: tells all that is missing.
    """
    problems = [*_exposure(console), *_authentication(console)]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _exposure(console: ConsoleSettings) -> list[str]:
    problems = []
    is_open = not is_loopback(console.listen.rpartition(":")[0])
    if is_open and console.authentication is Authentication.NONE:
        problems.append(
            f"console.listen = {console.listen}: beyond loopback the console needs authentication. Set"
            " console.authentication to password, proxy or oidc (docs/console.md), or listen on 127.0.0.1"
        )
    if is_open and not console.origin:
        problems.append(
            f"console.listen = {console.listen}: beyond loopback, set console.origin to what browsers open, as in"
            " https://relay.example.org"
        )
    origin = urlsplit(console.origin)
    if origin.scheme == "http" and not is_loopback(origin.hostname or ""):
        problems.append(
            f"console.origin = {console.origin}: browsers keep the session's cookie by https alone. Put a proxy with a"
            " certificate in front"
        )
    return problems


def _authentication(console: ConsoleSettings) -> list[str]:
    match console.authentication:
        case Authentication.NONE:
            return []
        case Authentication.PASSWORD:
            problems = _missing(console, "users")
            if not problems and not PasswordFile(console.users).lines():
                problems.append(f"console.users = {console.users} has no users: `relay console user add`")
            return problems
        case Authentication.PROXY:
            return _missing(console, "trusted_proxies") + _missing_groups(console)
        case Authentication.OIDC:
            return _missing(console, "oidc_issuer", "oidc_client_id", "origin") + _missing_groups(console)


def _missing(console: ConsoleSettings, *keys: str) -> list[str]:
    kind = console.authentication
    return [f"console.{key}: console.authentication = {kind} needs it" for key in keys if not getattr(console, key)]


def _missing_groups(console: ConsoleSettings) -> list[str]:
    if any(getattr(console, key) for key in GROUPS):
        return []
    listed = ", ".join(f"console.{key}" for key in GROUPS)
    return [f"{listed}: console.authentication = {console.authentication} needs one of them, else nobody has a role"]
