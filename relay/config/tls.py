"""What may stand behind the question mark of `broker.url`, and the TLS that it asks for.

The AMQP library would read these parameters itself. But it ignores names that it does not know. It turns verification
off for `no_verify_ssl=false`, and it does not name a file that it cannot read.
"""

import ssl
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from yarl import URL

FILES = ("cafile", "certfile", "keyfile")
TLS_PARAMETERS = (*FILES, "capath", "cadata", "no_verify_ssl")
MECHANISMS = ("plain", "external")


class TlsFileError(OSError):
    """A file that a parameter of `broker.url` names cannot be used; the message names both."""


def require_known_parameters(url: URL) -> None:
    """Refuse parameters of an AMQP URL that would have no effect, or not the intended one.

    Raises:
        ValueError: its words name the parameter and what is taken; they repeat no part of a password.
    """
    for name in url.query:
        if name not in (*TLS_PARAMETERS, "auth"):
            # An @ here is one of a password that holds a question mark: its rest must not be shown.
            named = "a parameter" if "@" in url.raw_query_string else f"the parameter {name}"
            raise ValueError(f"{named} is not known; it takes {', '.join(TLS_PARAMETERS)} and auth")
        if len(url.query.getall(name)) > 1:
            raise ValueError(f"the parameter {name} is given twice")
        if name in TLS_PARAMETERS and url.scheme != "amqps":
            raise ValueError(f"the parameter {name} is for amqps://, and amqp:// does not encrypt")
    if url.query.get("no_verify_ssl", "0") not in ("0", "1"):
        raise ValueError("the parameter no_verify_ssl takes 0, or 1 to verify nothing")
    if url.query.get("auth", "plain").lower() not in MECHANISMS:
        raise ValueError(f"the parameter auth takes {' or '.join(MECHANISMS)}")
    if "keyfile" in url.query and "certfile" not in url.query:
        raise ValueError("the parameter keyfile needs certfile, the certificate of the key")
    try:
        _cadata(url)
    except ValueError:
        raise ValueError("the parameter cadata takes a DER certificate in base64, with %2B for each +") from None


def tls_context(url: URL) -> ssl.SSLContext:
    """Return the TLS that the parameters of an amqps URL ask for.

    The files are read now: a renewed certificate is in use from the next connection on.

    Raises:
        TlsFileError: a file cannot be used; it names the parameter and the file.
    """
    given = url.query
    for name in (*FILES, "capath"):
        _require_readable(name, given.get(name))
    try:
        context = ssl.create_default_context(
            cafile=given.get("cafile"), capath=given.get("capath"), cadata=_cadata(url)
        )
    except ssl.SSLError as error:
        raise TlsFileError(f"{_named(given, 'cafile', 'cadata')}: {error_words(error)}") from None
    if "certfile" in given:
        files = _named(given, "certfile", "keyfile")

        def no_passphrase() -> str:  # else OpenSSL asks for it at the terminal, and everything waits
            raise TlsFileError(f"{files}: the key is encrypted, and no passphrase can be given: decrypt it")

        try:
            context.load_cert_chain(given["certfile"], given.get("keyfile"), password=no_passphrase)
        except ssl.SSLError as error:
            raise TlsFileError(f"{files}: {error_words(error)}") from None
    if given.get("no_verify_ssl") == "1":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def error_words(error: ssl.SSLError) -> str:
    """Return what OpenSSL says, without its numbers and the place in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return str(error.args[-1]).partition(" (_ssl.c:")[0]


def _require_readable(name: str, path: str | None) -> None:
    if path is None:
        return
    try:
        if name == "capath":
            next(Path(path).iterdir(), None)
        else:
            Path(path).open("rb").close()
    except OSError as error:
        raise TlsFileError(f"{name} {path}: {error.strerror}") from None


def _named(given: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name} {given[name]}" for name in names if name in given)


def _cadata(url: URL) -> bytes | None:
    data = url.query.get("cadata")
    return b64decode(data, validate=True) if data is not None else None
