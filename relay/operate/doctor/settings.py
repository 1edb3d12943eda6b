"""What the settings alone say: who could read along, whether the memory suffices, and whether routing keys fit."""

import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from pydantic import SecretStr
from yarl import URL

from relay.config.keys import all_keys, as_json
from relay.config.loading import FILE_SUFFIX
from relay.config.settings import DatabaseSettings, RelaySettings, Route, Settings
from relay.operate.doctor.finding import Finding, Verdict
from relay.runtime.listen import is_loopback
from relay.runtime.memory import (
    LEAST_WINDOW,
    Limit,
    largest_within,
    memory_limit,
    mib,
    needed,
    size_words,
    window_within,
)
from relay.servers.postgres.database import conninfo
from relay.servers.rabbitmq.hosts import broker_urls

GUEST = "guest"
ENCRYPTION, FILES = "settings.encryption", "settings.secret_files"
FOR_ALL = stat.S_IROTH | stat.S_IWOTH
VERIFY = "use sslmode=verify-full and sslrootcert=PATH in database.url (docs/tls.md)"

# What libpq's sslmode allows, and what it verifies.
REFUSED = "a host in between can refuse TLS, and gets rows, and the password if it asks for it, in the clear"
WEAK = {
    "disable": "rows go there in the clear",
    "allow": REFUSED,
    "prefer": REFUSED,
    "require": "nothing is verified: a host in between gets rows, and the password if it asks for it",
}
STRONG = {
    "verify-ca": "the authority of the certificate is verified, its name is not",
    "verify-full": "authority and name of the certificate are verified",
}


def exposure(
    settings: Settings, environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> Iterator[Finding]:
    """Look at the URLs of both servers and at the files that hold secrets; `file` is the relay.toml that was read."""
    urls = broker_urls(settings.broker)
    remote = [url for url in urls if not _is_local(url.host or "")]
    yield _login(remote)
    yield _broker_encryption(remote, is_mixed=len({url.scheme for url in urls}) > 1)
    yield _database_encryption(settings.database)
    yield from _secret_files(urls, environ, file)


def _login(remote: list[URL]) -> Finding:
    check = "settings.login"
    guests = [url for url in remote if (url.user or GUEST) == GUEST and url.query.get("auth", "").lower() != "external"]
    if guests:
        words = (
            f"the user {GUEST}, whose password everybody knows, on {_names(guests)};"
            " brokers let it in from loopback only"
        )
        return Finding(check, Verdict.WARNING, words, "make a user for the relay, and name it in broker.url")
    return Finding(check, Verdict.OK, f"no host beyond loopback is entered as {GUEST}")


def _broker_encryption(remote: list[URL], *, is_mixed: bool) -> Finding:
    if plain := [url for url in remote if url.scheme == "amqp"]:
        words = f"broker: messages and password go to {_names(plain)} in the clear"
        if is_mixed:
            words += (
                "; the relay goes there when the hosts with amqps:// cannot be reached, and an attacker can see to that"
            )
        return Finding(ENCRYPTION, Verdict.WARNING, words, "use amqps:// for every host in broker.url (docs/tls.md)")
    if unverified := [url for url in remote if url.query.get("no_verify_ssl") == "1"]:
        words = (
            f"broker: no certificate of {_names(unverified)} is verified: a host in between gets messages and password"
        )
        remedy = "take no_verify_ssl out of broker.url, and name the authority in cafile=PATH"
        return Finding(ENCRYPTION, Verdict.WARNING, words, remedy)
    return Finding(ENCRYPTION, Verdict.OK, "broker: every host is on loopback or behind TLS that is verified")


def _database_encryption(database: DatabaseSettings) -> Finding:
    given = conninfo_to_dict(conninfo(database))
    if "service" in given:
        return Finding(ENCRYPTION, Verdict.SKIPPED, f"database: the service {given['service']} decides")
    # As libpq sees it: what is not in the URL comes from the environment, or is the default.
    used = {each.keyword.decode(): each.val.decode() for each in Conninfo.get_defaults() if each.val} | given
    hosts = str(used.get("hostaddr") or used.get("host") or "").split(",")
    remote = ", ".join(host for host in hosts if not _is_local(host))
    mode = _sslmode(used, is_said="sslmode" in given or "PGSSLMODE" in os.environ)
    if not remote:
        return Finding(ENCRYPTION, Verdict.OK, "database: every host is on loopback or a local socket")
    if "require" in (used.get("channel_binding"), used.get("gssencmode")):
        words = f"database: channel_binding or gssencmode lets nobody in between this host and {remote}"
        return Finding(ENCRYPTION, Verdict.OK, words)
    if mode in WEAK:
        return Finding(ENCRYPTION, Verdict.WARNING, f"database: sslmode={mode} to {remote}: {WEAK[mode]}", VERIFY)
    return Finding(ENCRYPTION, Verdict.OK, f"database: sslmode={mode} to {remote}: {STRONG[mode]}")


def _sslmode(used: Mapping[str, Any], *, is_said: bool) -> str:
    """Return the mode that libpq goes by."""
    mode, authority = str(used["sslmode"]), str(used.get("sslrootcert") or Path.home() / ".postgresql" / "root.crt")
    if authority == "system":
        return mode if is_said else "verify-full"
    return "verify-ca" if mode == "require" and os.path.exists(authority) else mode


def _secret_files(urls: list[URL], environ: Mapping[str, str], file: Path | None) -> Iterator[Finding]:
    variables = [variable + FILE_SUFFIX for key in all_keys() for variable in key.variables]
    named = [environ[variable] for variable in variables if variable in environ]
    keys = [url.query["keyfile"] for url in urls if "keyfile" in url.query]  # libpq itself refuses an open sslkey
    paths = [Path(path) for path in dict.fromkeys([*named, *keys])]
    if file is not None and _holds_password(file):
        paths.append(file)
    closed = 0
    for path in paths:
        try:
            is_open = path.stat().st_mode & FOR_ALL
        except OSError as error:
            yield Finding(FILES, Verdict.SKIPPED, f"{path}, which holds a secret: {error.strerror}")
            continue
        if is_open:
            words = f"every user of this host can read or change {path}, which holds a secret"
            yield Finding(FILES, Verdict.WARNING, words, f"chmod o-rw {path}")
        closed += not is_open
    if closed or not paths:
        yield Finding(FILES, Verdict.OK, f"{closed} files hold secrets and are not open to every user of this host")


def _holds_password(file: Path) -> bool:
    if not file.is_file():  # a pipe is read once, and has been
        return False
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    for key in all_keys():
        if key.is_secret:
            section, name = key.path
            value = tables.get(section, {}).get(name)
            if value is not None and as_json(SecretStr(value)) != value:
                return True
    return False


def _names(urls: list[URL]) -> str:
    return ", ".join(str(url.host) for url in urls)


def _is_local(host: str) -> bool:
    """Whether a host, as both URLs name it, is on loopback or a local socket."""
    return not host or host.startswith(("/", "@")) or is_loopback(host)


def memory(relay: RelaySettings, limit: Limit | None = None) -> Finding:
    """Compare the settings with the memory limit of this process, or with `limit`."""
    limit = limit or memory_limit()
    window, largest = relay.max_window_bytes, relay.max_message_bytes
    words = (
        f"a window of {size_words(window)} and messages of up to {size_words(largest)} take at most"
        f" {mib(needed(window, largest))};"
        f" the limit is {mib(limit.size)} ({limit.source})"
    )
    least = needed(LEAST_WINDOW, largest)
    if least > limit.size:
        fits = largest_within(limit.size)
        lower = f", or lower relay.max_message_bytes to {fits}" if fits else ""
        return _short(f"{words}: one such message may end the relay", f"raise the limit to {mib(least)}{lower}")
    if needed(window, largest) > limit.size:
        return _short(words, f"unset relay.max_window_bytes, or lower it to {window_within(limit.size, largest)}")
    return Finding("settings.memory", Verdict.OK, words)


def _short(words: str, remedy: str) -> Finding:
    return Finding("settings.memory", Verdict.WARNING, words, remedy)


MAX_BYTES = 255  # an AMQP short string
ONE_CHARACTER = re.compile(r"\[!?\]?[^\]]*\]|\?")


def routes(settings: Settings) -> Iterator[Finding]:
    """Look for routes of which each row would be parked, as its routing key is too long."""
    check = "settings.routes"
    too_long = [(route, size) for route in settings.routes if (size := _least_bytes(route)) > MAX_BYTES]
    for route, size in too_long:
        words = (
            f"the route of event_type {route.event_type!r} and aggregate_type {route.aggregate_type!r} makes routing"
            f" keys of at least {size} bytes; the limit is {MAX_BYTES}. No such row can be sent"
        )
        yield Finding(check, Verdict.FAILED, words, "shorten its routing_key")
    if not too_long:
        yield Finding(check, Verdict.OK, f"each route can make routing keys of at most {MAX_BYTES} bytes")


def _least_bytes(route: Route) -> int:
    """Return how long a routing key of this route is at least."""
    shortest = {
        "{event_type}": _shortest(route.event_type),
        "{aggregate_type}": _shortest(route.aggregate_type),
        "{aggregate_id}": "",
    }
    key = re.sub("|".join(map(re.escape, shortest)), lambda found: shortest[found[0]], route.routing_key)
    return len(key.encode())


def _shortest(pattern: str) -> str:
    """Return a text as short as the shortest that a shell pattern matches."""
    return ONE_CHARACTER.sub("x", pattern).replace("*", "")
