"""Login by an OpenID Connect provider: authorization code flow with PKCE.

What belongs to a login that has begun follows from a random text in a separate cookie. That one is SameSite=Lax, as
the provider's answer comes from another site.
"""

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote_plus, urlencode, urlsplit

import httpx
import orjson
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from relay.config.settings import ConsoleSettings
from relay.console.access.groups import role_of
from relay.console.access.identity import Identity, RefusedError
from relay.observe.printable import printable

COOKIE = "__Host-relay-login"
CALLBACK = "/login/callback"
LOGIN_TIMEOUT = 600  # seconds at the provider's pages
TIMEOUT = 10.0  # seconds for an answer of the provider
MOST_BYTES = 1024 * 1024  # of an answer
KEPT = 3600.0  # seconds that the provider's addresses and keys are kept
NEEDED = ("authorization_endpoint", "token_endpoint", "jwks_uri")  # of its addresses
ASKED = {"Accept": "application/json", "Accept-Encoding": "identity"}  # what is compressed may be long without end
LEEWAY = 60  # seconds that clocks may differ
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]

_KEY = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Begun:
    """A login that has begun; all follows from `seed`."""

    seed: str

    @property
    def state(self) -> str:
        return self._derived("state")

    @property
    def nonce(self) -> str:
        return self._derived("nonce")

    @property
    def verifier(self) -> str:
        return self._derived("verifier")

    @property
    def challenge(self) -> str:
        return _text(hashlib.sha256(self.verifier.encode()).digest())

    def _derived(self, use: str) -> str:
        digest = hmac.new(_KEY, f"{use} {self.seed}".encode(), hashlib.sha256).digest()
        return _text(digest)


class Provider:
    """The provider of console.oidc_issuer; it is asked when the first user logs in."""

    def __init__(self, console: ConsoleSettings) -> None:
        self._console = console
        self._known: Mapping[str, Any] = {}
        self._keys: KeySet | None = None
        self._asked_at = 0.0

    async def begin(self) -> tuple[Begun, str]:
        """Return a login that begins, and the page of the provider where it goes on.

        Raises:
            RefusedError: the provider does not answer as one does.
        """
        begun = Begun(secrets.token_urlsafe(32))
        asked = {
            "response_type": "code",
            "client_id": self._console.oidc_client_id,
            "redirect_uri": self._redirect_uri,
            "scope": self._console.oidc_scopes,
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": begun.challenge,
            "code_challenge_method": "S256",
        }
        page = (await self._metadata())["authorization_endpoint"]
        return begun, f"{page}{'&' if '?' in page else '?'}{urlencode(asked)}"

    async def finish(self, begun: Begun, query: str) -> Identity:
        """Return the user for whom the provider has sent the browser back.

        Raises:
            RefusedError: the answer is not to this login, is not the provider's, or names nobody with a role.
        """
        given = {name: values[0] for name, values in parse_qs(query).items()}
        if not hmac.compare_digest(given.get("state", "").encode(), begun.state.encode()):
            raise RefusedError(HTTPStatus.FORBIDDEN, "this is no answer to a login that was begun here: begin again")
        if "error" in given or "code" not in given:
            raise _not_logged_in(given.get("error_description") or given.get("error", "it sent no code"))
        try:
            token = await self._token(given["code"], begun.verifier)
            claims = await self._claims(str(token["id_token"]), begun.nonce)
            place = (await self._metadata()).get("userinfo_endpoint")
            if place and self._console.oidc_groups_claim not in claims:
                claims |= await _user(str(place), str(token["access_token"]), claims["sub"])
        except KeyError as error:
            raise _not_logged_in(f"its answer has no {error}") from error
        except (JoseError, httpx.HTTPError, ValueError) as error:
            raise _not_logged_in(_words(error)) from error
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        # Users may change the first two; the audit needs what stays, too.
        called, subject = claims.get("preferred_username") or claims.get("email"), claims["sub"]
        if not isinstance(called, str | None) or not isinstance(subject, str):
            raise _not_logged_in("it names the user by no text")
        name = printable(f"{called} ({subject})" if called and called != subject else subject)
        told = claims.get(self._console.oidc_groups_claim) or []
        groups = [told] if isinstance(told, str) else told
        if not isinstance(groups, list) or not all(isinstance(each, str) for each in groups):
            raise _not_logged_in(f"its claim {self._console.oidc_groups_claim} is no list of names")
        if (role := role_of(groups, self._console)) is None:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"no group of {name} has a role in this console")
        return Identity(name, role)

    async def _token(self, code: str, verifier: str) -> Mapping[str, Any]:
        """Return the tokens for a code, which the provider gives once, and to who has the verifier."""
        console = self._console
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "code_verifier": verifier,
            "redirect_uri": self._redirect_uri,
            "client_id": console.oidc_client_id,
        }
        secret = console.oidc_client_secret.get_secret_value()
        # RFC 6749, 2.3.1: both are encoded as in a form first.
        login = (
            httpx.BasicAuth(quote_plus(console.oidc_client_id), quote_plus(secret))
            if secret
            else httpx.USE_CLIENT_DEFAULT
        )
        place = (await self._metadata())["token_endpoint"]
        return await _told("POST", place, data=form, auth=login)

    async def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        """Return what an ID token says, once its signature, issuer, audience, age and nonce are right."""
        try:
            decoded = jwt.decode(token, await self._key_set(), algorithms=ALGORITHMS)
        except InvalidKeyIdError:  # the provider may have new ones
            decoded = jwt.decode(token, await self._key_set(fresh=True), algorithms=ALGORITHMS)
        self._check(decoded.claims, nonce)
        return dict(decoded.claims)

    def _check(self, claims: dict[str, Any], nonce: str) -> None:
        client = self._console.oidc_client_id
        expected = jwt.JWTClaimsRegistry(
            leeway=LEEWAY,
            iss={"essential": True, "value": self._console.oidc_issuer},
            aud={"essential": True, "value": client},
            azp={"essential": isinstance(claims.get("aud"), list) and len(claims["aud"]) > 1, "value": client},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        expected.validate(claims)

    async def _metadata(self) -> Mapping[str, Any]:
        if self._known and time.monotonic() - self._asked_at < KEPT:
            return self._known
        issuer = self._console.oidc_issuer
        known: Mapping[str, Any] = await self._get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if known.get("issuer") != issuer:
            raise _not_logged_in(f"it names itself {known.get('issuer')}, and console.oidc_issuer is {issuer}")
        for name in NEEDED:
            if not str(known.get(name)).startswith(("https://", "http://")):
                raise _not_logged_in(f"its {name} is no address")
        self._known, self._keys, self._asked_at = known, None, time.monotonic()
        return known

    async def _key_set(self, *, fresh: bool = False) -> KeySet:
        if self._keys is None or fresh:
            self._keys = KeySet.import_key_set(await self._get((await self._metadata())["jwks_uri"]))
        return self._keys

    async def _get(self, address: str) -> Any:
        try:
            return await _told("GET", address)
        except (httpx.HTTPError, ValueError) as error:
            raise _not_logged_in(f"{urlsplit(address).netloc} does not answer: {_words(error)}") from error

    @property
    def _redirect_uri(self) -> str:
        return self._console.origin + CALLBACK


async def _user(address: str, token: str, subject: str) -> dict[str, Any]:
    """Return what the provider says of the user beyond the ID token."""
    told = await _told("GET", address, headers={"Authorization": f"Bearer {token}"})
    if told.get("sub") != subject:
        raise ValueError("its answer is about another user")
    return told


async def _told(method: str, address: str, **request: Any) -> dict[str, Any]:
    """Return the object that the provider answers; it may neither take its time nor be long.

    Raises:
        httpx.HTTPError, ValueError: it answers no object, or an error.
    """
    body = bytearray()
    try:
        async with (
            asyncio.timeout(TIMEOUT),
            httpx.AsyncClient(headers=ASKED) as client,
            client.stream(method, address, **request) as answer,
        ):
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise ValueError("its answer is too long")
    except TimeoutError:
        raise ValueError(f"no answer within {TIMEOUT:g} s") from None
    except httpx.InvalidURL as error:
        raise ValueError(str(error)) from error
    told = _read(body)
    if "error" in told:
        raise ValueError(told.get("error_description") or told["error"])
    answer.raise_for_status()
    if not told:
        raise ValueError("its answer is no object")
    return told


def _read(body: bytes | bytearray) -> dict[str, Any]:
    """Return the object that an answer is; an empty one if it is something else."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _text(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _not_logged_in(reason: str) -> RefusedError:
    return RefusedError(HTTPStatus.BAD_GATEWAY, f"the provider did not log you in: {reason}")


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
