"""An OpenID Connect provider that says what a test wants it to say."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

CLIENT = "relay-console"
KEY = RSAKey.generate_key(2048, {"kid": "ours", "use": "sig"})
CURVE = ECKey.generate_key("P-256", {"kid": "curve", "use": "sig"})
STRANGE = RSAKey.generate_key(2048, {"kid": "ours"})  # another key by the name of ours
DISCOVERY, KEYS, TOKEN, USER = "/.well-known/openid-configuration", "/keys", "/token", "/user"

Answer = Callable[[BaseHTTPRequestHandler], None]


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    """Return an answer of this value."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, each in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), each)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def signed(claims: Mapping[str, Any], key: Any = KEY, **header: Any) -> str:
    """Return a token of these claims."""
    said = {"alg": "RS256", "kid": key.kid, **header}
    return jwt.encode({name: value for name, value in said.items() if value is not None}, dict(claims), key)


def endless(handler: BaseHTTPRequestHandler, *, part: bytes = b" " * 65_536, pause: float = 0) -> None:
    """Answer with blanks and no end."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    with suppress(OSError):
        while True:
            handler.wfile.write(part)
            time.sleep(pause)


@dataclass(slots=True)
class Rogue:
    """What the provider answers; a test changes some of it.

    Attributes:
        claims: of the ID token, in place of the usual ones; `...` leaves one out.
        sign: makes the token of the claims.
        answers: by path, in place of the usual ones.
        nonce: of the login that has begun.
        asked: the paths that were asked for.
    """

    issuer: str
    claims: dict[str, Any] = field(default_factory=dict)
    sign: Callable[[Mapping[str, Any]], Any] = signed
    answers: dict[str, Answer] = field(default_factory=dict)
    nonce: str = ""
    asked: list[str] = field(default_factory=list)

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": self.issuer + TOKEN,
            "userinfo_endpoint": self.issuer + USER,
            "jwks_uri": self.issuer + KEYS,
            "id_token_signing_alg_values_supported": ["RS256", "ES256"],
        }

    def usual(self, path: str) -> Answer:
        match path:
            case "/.well-known/openid-configuration":
                return as_json(self.metadata)
            case "/keys":
                return as_json({"keys": [KEY.as_dict(private=False), CURVE.as_dict(private=False)]})
            case "/token":
                return as_json({"access_token": "a", "token_type": "Bearer", "id_token": self.sign(self.told())})
            case "/user":
                return as_json({"sub": "1", "groups": ["sre"]})
            case _:
                return as_json({"error": "not_found"}, 404)

    def told(self) -> dict[str, Any]:
        now = int(time.time())
        claims = {
            "iss": self.issuer, "sub": "1", "aud": CLIENT, "exp": now + 60, "iat": now, "nonce": self.nonce,
            "groups": ["sre"], **self.claims,
        }  # fmt: skip
        return {name: value for name, value in claims.items() if value is not ...}


@contextmanager
def rogue_provider() -> Iterator[Rogue]:
    """Yield a provider that answers on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            path = urlsplit(self.path).path
            rogue.asked.append(path)
            rogue.answers.get(path, rogue.usual(path))(self)

        do_POST = do_GET  # noqa: N815  (the library's names)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        rogue = Rogue(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield rogue
        finally:
            server.shutdown()
            thread.join()
