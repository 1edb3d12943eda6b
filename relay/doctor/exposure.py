"""Who could read along: logins that everybody knows, connections in the clear, secrets in open files."""

import os
import stat
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from relay.broker_hosts import broker_urls
from relay.configuration import FILE_SUFFIX
from relay.doctor.finding import Finding, Verdict
from relay.keys import all_keys
from relay.settings import Settings

GUEST = "guest"


def exposure(settings: Settings, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at the URLs of the broker and at the files that hold secrets."""
    remote = [url for url in broker_urls(settings.broker) if not _is_loopback(url.host or "")]
    guests = ", ".join(f"{url.host}" for url in remote if (url.user or GUEST) == GUEST)
    if guests:
        words = f"the user {GUEST}, whose password everybody knows, on {guests}; brokers let it in from loopback only"
        yield Finding("settings.login", Verdict.WARNING, words, "make a user for the relay, and name it in broker.url")
    else:
        yield Finding("settings.login", Verdict.OK, f"no host beyond loopback is entered as {GUEST}")
    plain = ", ".join(f"{url.host}" for url in remote if url.scheme == "amqp")
    if plain:
        words = f"messages and password go to {plain} in the clear"
        yield Finding("settings.encryption", Verdict.WARNING, words, "use amqps:// in broker.url")
    else:
        yield Finding("settings.encryption", Verdict.OK, "every host of the broker is on loopback or behind TLS")
    yield from _secret_files(environ)


def _secret_files(environ: Mapping[str, str]) -> Iterator[Finding]:
    check = "settings.secret_files"
    paths = [environ[key.variable + FILE_SUFFIX] for key in all_keys() if key.variable + FILE_SUFFIX in environ]
    is_open = [path for path in paths if Path(path).stat().st_mode & stat.S_IROTH]
    for path in is_open:
        yield Finding(check, Verdict.WARNING, f"every user of this host can read {path}", f"chmod o-r {path}")
    if not is_open:
        yield Finding(check, Verdict.OK, f"{len(paths)} secret files, none readable by others")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
