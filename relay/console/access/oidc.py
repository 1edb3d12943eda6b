"""Login by an OpenID Connect provider: authorization code flow with PKCE.

What belongs to a login that has begun follows from a random text in a cookie of its own. That one is SameSite=Lax, as
the provider's answer comes from another site.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from relay.config.settings import ConsoleSettings
from relay.console.access.groups import role_of
from relay.console.access.identity import Identity, RefusedError

COOKIE = "__Host-relay-login"
CALLBACK = "/login/callback"
LOGIN_TIMEOUT = 600  # seconds at the provider's pages
TIMEOUT = 10.0  # seconds for an answer of the provider
KEPT = 3600.0  # seconds that the provider's addresses and keys are kept
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

    def _derived(self, use: str) -> str:
        digest = hmac.new(_KEY, f"{use} {self.seed}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


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
        known = await self._metadata()
        async with self._client() as client:
            address, _ = client.create_authorization_url(
                known["authorization_endpoint"], state=begun.state, code_verifier=begun.verifier, nonce=begun.nonce
            )
        return begun, str(address)

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
        known = await self._metadata()
        async with self._client() as client:
            try:
                token = await client.fetch_token(
                    known["token_endpoint"], code=given["code"], code_verifier=begun.verifier
                )
                claims = await self._claims(token.get("id_token", ""), begun.nonce)
                if self._console.oidc_groups_claim not in claims and "userinfo_endpoint" in known:
                    claims |= await self._told(client, known["userinfo_endpoint"], claims["sub"])
            except (OAuthError, JoseError, httpx.HTTPError, ValueError) as error:
                raise _not_logged_in(_words(error)) from error
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        name = str(claims.get("preferred_username") or claims.get("email") or claims["sub"])
        told = claims.get(self._console.oidc_groups_claim, [])
        groups = [told] if isinstance(told, str) else [str(each) for each in told]
        if (role := role_of(groups, self._console)) is None:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"no group of {name} has a role in this console")
        return Identity(name, role)

    async def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        """Return what an ID token says, once its signature, issuer, audience, age and nonce are right."""
        try:
            decoded = jwt.decode(token, await self._key_set(), algorithms=ALGORITHMS)
        except InvalidKeyIdError:  # the provider may have new ones
            decoded = jwt.decode(token, await self._key_set(fresh=True), algorithms=ALGORITHMS)
        expected = jwt.JWTClaimsRegistry(
            leeway=LEEWAY,
            iss={"essential": True, "value": self._console.oidc_issuer},
            aud={"essential": True, "value": self._console.oidc_client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        expected.validate(decoded.claims)
        return dict(decoded.claims)

    async def _told(self, client: AsyncOAuth2Client, address: str, subject: str) -> dict[str, Any]:
        """Return what the provider says of the user beyond the ID token."""
        answer = await client.get(address)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        if told.get("sub") != subject:
            raise ValueError("its answer is about another user")
        return told

    async def _metadata(self) -> Mapping[str, Any]:
        if self._known and time.monotonic() - self._asked_at < KEPT:
            return self._known
        issuer = self._console.oidc_issuer
        known: Mapping[str, Any] = await self._get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if known.get("issuer") != issuer:
            raise _not_logged_in(f"it names itself {known.get('issuer')}, and console.oidc_issuer is {issuer}")
        self._known, self._keys, self._asked_at = known, None, time.monotonic()
        return known

    async def _key_set(self, *, fresh: bool = False) -> KeySet:
        if self._keys is None or fresh:
            self._keys = KeySet.import_key_set(await self._get((await self._metadata())["jwks_uri"]))
        return self._keys

    async def _get(self, address: str) -> Any:
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT) as client:
                return (await client.get(address)).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise _not_logged_in(f"{urlsplit(address).netloc} does not answer: {_words(error)}") from error

    def _client(self) -> AsyncOAuth2Client:
        console = self._console
        secret = console.oidc_client_secret.get_secret_value()
        return AsyncOAuth2Client(
            console.oidc_client_id,
            secret or None,
            scope=console.oidc_scopes,
            redirect_uri=console.origin + CALLBACK,
            code_challenge_method="S256",
            token_endpoint_auth_method="client_secret_basic" if secret else "none",
            timeout=TIMEOUT,
        )


def _not_logged_in(reason: str) -> RefusedError:
    return RefusedError(HTTPStatus.BAD_GATEWAY, f"the provider did not log you in: {reason}")


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
