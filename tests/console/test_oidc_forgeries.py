"""An OpenID Connect provider that lies, or what stands between it and the console, logs nobody in."""

import base64
import hashlib
import hmac
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from joserfc import jwe
from joserfc.jwk import OctKey

from relay.config.settings import ConsoleSettings
from relay.console.access import oidc
from relay.console.access.identity import Identity, RefusedError
from relay.console.access.oidc import Provider
from relay.operate.operation import Role
from tests.console.rogue import (
    CLIENT,
    CURVE,
    DISCOVERY,
    KEY,
    KEYS,
    STRANGE,
    TOKEN,
    USER,
    Answer,
    Rogue,
    as_json,
    endless,
    rogue_provider,
    signed,
)
from tests.console.site import ORIGIN

NOW = int(time.time())
SECRET = OctKey.import_key("s" * 32, {"kid": "ours"})


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    with rogue_provider() as rogue:
        yield rogue


async def logged_in(rogue: Rogue, **query: str | None) -> Identity:
    """Log in at the provider, and come back with this."""
    given = {
        "authentication": "oidc", "oidc_issuer": rogue.issuer, "oidc_client_id": CLIENT, "oidc_client_secret": "s" * 32,
        "owner_groups": "sre", "origin": ORIGIN,
    }  # fmt: skip
    provider = Provider(ConsoleSettings.model_validate(given))
    begun, place = await provider.begin()
    asked = parse_qs(urlsplit(place).query)
    rogue.nonce = asked["nonce"][0]
    back = {"code": "c", "state": asked["state"][0], **query}
    return await provider.finish(begun, urlencode({name: value for name, value in back.items() if value is not None}))


def part(value: object) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def unsigned(claims: Any, header: object, signature: bytes = b"") -> str:
    return f"{part(header)}.{part(claims)}.{part(signature)}"


def by_hmac(claims: Any, secret: bytes) -> str:
    """Return a token whose signature needs no more than what all know."""
    begun = f"{part({'alg': 'HS256', 'kid': 'ours'})}.{part(claims)}"
    return f"{begun}.{part(hmac.digest(secret, begun.encode(), hashlib.sha256))}"


async def test_a_provider_that_lies_about_nothing_logs_in(rogue: Rogue) -> None:
    assert await logged_in(rogue) == Identity("1", Role.OWNER)


async def test_a_token_by_a_curve_logs_in(rogue: Rogue) -> None:
    rogue.sign = lambda claims: signed(claims, CURVE, alg="ES256")

    assert await logged_in(rogue) == Identity("1", Role.OWNER)


CLAIMS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://evil.test"},
    "no issuer": {"iss": ...},
    "issuers": {"iss": ["https://evil.test"]},
    "another audience": {"aud": "other"},
    "another audience, authorized for us": {"aud": "other", "azp": CLIENT},
    "audiences without us": {"aud": ["other", "another"], "azp": CLIENT},
    "no audience": {"aud": ...},
    "an audience that begins like us": {"aud": f"{CLIENT}-2"},
    "authorized for another": {"azp": "other"},
    "several audiences, authorized for nobody": {"aud": [CLIENT, "other"]},
    "expired": {"exp": NOW - 3600},
    "no end": {"exp": ...},
    "an end that is no number": {"exp": "never"},
    "an end that is true": {"exp": True},
    "not yet": {"nbf": NOW + 3600},
    "issued in the future": {"iat": NOW + 3600},
    "never issued": {"iat": ...},
    "the nonce of another login": {"nonce": "other"},
    "no nonce": {"nonce": ...},
    "an empty nonce": {"nonce": ""},
    "a list of nonces": {"nonce": ["n"]},
    "no subject": {"sub": ...},
    "nothing as subject": {"sub": None},
    "an empty subject": {"sub": ""},
    "a subject that is no text": {"sub": {"a": 1}},
    "a number as subject": {"sub": 7},
    "groups that are true": {"groups": True},
    "groups as keys": {"groups": {"sre": True}},
    "groups in groups": {"groups": [["sre"]]},
    "no group": {"groups": False},
    "a group with blanks": {"groups": [" sre"]},
    "groups in one text": {"groups": "sre,other"},
    "a name that is no text": {"preferred_username": {"a": 1}},
}


@pytest.mark.parametrize("name", CLAIMS)
async def test_a_token_that_says_so_logs_nobody_in(rogue: Rogue, name: str) -> None:
    rogue.claims = CLAIMS[name]

    with pytest.raises(RefusedError):
        await logged_in(rogue)


SIGNED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "not at all": lambda claims: unsigned(claims, {"alg": "none"}),
    "not at all, in capitals": lambda claims: unsigned(claims, {"alg": "NONE", "kid": "ours"}),
    "with an empty signature": lambda claims: unsigned(claims, {"alg": "RS256", "kid": "ours"}),
    "without an algorithm": lambda claims: unsigned(claims, {"kid": "ours"}, b"x"),
    "with zeros on a curve": lambda claims: unsigned(claims, {"alg": "ES256", "kid": "curve"}, b"\0" * 64),
    "with the public key as a secret": lambda claims: by_hmac(claims, KEY.as_pem(private=False)),
    "with the public key as text": lambda claims: by_hmac(claims, json.dumps(KEY.as_dict(private=False)).encode()),
    "with the secret of the client": lambda claims: by_hmac(claims, b"s" * 32),
    "with another key by our name": lambda claims: signed(claims, STRANGE),
    "with another key without a name": lambda claims: signed(claims, STRANGE, kid=None),
    "with a key of no name": lambda claims: signed(claims, kid="unknown"),
    "with a key that it brings": lambda claims: signed(claims, STRANGE, jwk=STRANGE.as_dict(private=False)),
    "with a key elsewhere": lambda claims: signed(claims, STRANGE, jku="https://evil.test/keys"),
    "with a key of a path": lambda claims: unsigned(claims, {"alg": "RS256", "kid": "../../dev/null"}, b"x"),
    "and encrypted for us": lambda claims: jwe.encrypt_compact(
        {"alg": "dir", "enc": "A128CBC-HS256"}, json.dumps(claims).encode(), OctKey.import_key("s" * 32)
    ),
    "with what must be understood": lambda claims: unsigned(
        claims, {"alg": "RS256", "kid": "ours", "crit": ["exp"]}, b"x"
    ),
    "with a header that is a list": lambda claims: unsigned(claims, ["RS256"], b"x"),
    "with a header that is deep": lambda claims: unsigned(claims, b"[" * 200_000, b"x"),
    "over claims that are a list": lambda _: unsigned([1], {"alg": "RS256", "kid": "ours"}, b"x"),
    "as a number": lambda _: 7,
    "as nothing": lambda _: None,
    "as an object": dict,
    "as a word": lambda _: "token",
    "as dots": lambda _: "..",
    "with changed claims": lambda claims: ".".join(
        (*signed(claims).split(".")[:1], part({**claims, "sub": "2"}), signed(claims).split(".")[2])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNED)
async def test_a_token_that_is_signed_so_logs_nobody_in(rogue: Rogue, name: str) -> None:
    rogue.sign = SIGNED[name]

    with pytest.raises(RefusedError):
        await logged_in(rogue)


async def test_a_secret_among_the_keys_signs_nothing(rogue: Rogue) -> None:
    rogue.answers[KEYS] = as_json({"keys": [SECRET.as_dict(private=True), KEY.as_dict(private=False)]})
    rogue.sign = lambda claims: by_hmac(claims, b"s" * 32)

    with pytest.raises(RefusedError):
        await logged_in(rogue)


async def test_a_private_key_among_the_keys_is_of_no_use(rogue: Rogue) -> None:
    rogue.answers[KEYS] = as_json({"keys": [KEY.as_dict(private=True)]})
    rogue.sign = lambda claims: signed(claims, STRANGE)

    with pytest.raises(RefusedError) as refused:
        await logged_in(rogue)

    assert str(KEY.as_dict(private=True)["d"]) not in str(refused.value)


@pytest.mark.parametrize(
    "query",
    [
        {"state": None},
        {"state": ""},
        {"state": "other"},
        {"state": "é"},
        {"code": None},
        {"code": ""},
        {"error": "access_denied"},
        {"error": "x", "error_description": "<script>alert(1)</script>"},
    ],
    ids=str,
)
async def test_an_answer_to_another_login_logs_nobody_in(rogue: Rogue, query: dict[str, str | None]) -> None:
    with pytest.raises(RefusedError):
        await logged_in(rogue, **query)

    assert TOKEN not in rogue.asked


ANSWERS: dict[str, Callable[[Rogue], Answer]] = {
    "a redirect": lambda rogue: as_json({}, 302, Location=f"{rogue.issuer}/other"),
    "a redirect that keeps the body": lambda rogue: as_json({}, 307, Location=f"{rogue.issuer}/other"),
    "a list": lambda _: as_json([]),
    "a text": lambda _: as_json("x"),
    "nothing": lambda _: as_json(None),
    "no JSON": lambda _: as_json(b"<html>"),
    "no text": lambda _: as_json(b"\xff\xfe"),
    "an empty object": lambda _: as_json({}),
    "an error": lambda _: as_json({"error": "server_error"}, 500),
    "a depth": lambda _: as_json(b"[" * 200_000),
}  # fmt: skip


@pytest.mark.parametrize("place", [DISCOVERY, KEYS, TOKEN, USER])
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_of_another_kind_logs_nobody_in(rogue: Rogue, place: str, name: str) -> None:
    rogue.claims = {"groups": ...}  # so that the user's page is asked
    rogue.answers[place] = ANSWERS[name](rogue)

    with pytest.raises(RefusedError):
        await logged_in(rogue)

    assert place in rogue.asked
    assert "/other" not in rogue.asked


USERS = {
    "another user": {"sub": "2", "groups": ["sre"]},
    "no user": {"groups": ["sre"]},
    "a list of users": {"sub": ["1"], "groups": ["sre"]},
    "groups as keys": {"sub": "1", "groups": {"sre": True}},
    "no group": {"sub": "1"},
}


@pytest.mark.parametrize("name", USERS)
async def test_a_page_of_another_user_adds_no_group(rogue: Rogue, name: str) -> None:
    rogue.claims = {"groups": ...}
    rogue.answers[USER] = as_json(USERS[name])

    with pytest.raises(RefusedError):
        await logged_in(rogue)


@pytest.mark.parametrize("name", ["authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint"])
@pytest.mark.parametrize("value", [None, 7, ["https://evil.test"], "javascript:alert(1)", "file:///etc/passwd", "/a"])
async def test_an_address_that_leads_nowhere_logs_nobody_in(rogue: Rogue, name: str, value: object) -> None:
    rogue.claims = {"groups": ...}
    rogue.answers[DISCOVERY] = as_json({**rogue.metadata, name: value})

    with pytest.raises(RefusedError):
        await logged_in(rogue)


@pytest.mark.parametrize("name", ["token_endpoint", "jwks_uri", "userinfo_endpoint"])
async def test_an_address_that_cannot_be_logs_nobody_in(rogue: Rogue, name: str) -> None:
    rogue.claims = {"groups": ...}
    rogue.answers[DISCOVERY] = as_json({**rogue.metadata, name: "http://["})

    with pytest.raises(RefusedError):
        await logged_in(rogue)


@pytest.mark.parametrize("place", [DISCOVERY, KEYS, TOKEN, USER])
async def test_an_answer_without_end_is_not_taken(rogue: Rogue, place: str) -> None:
    rogue.claims = {"groups": ...}
    rogue.answers[place] = endless
    tracemalloc.start()

    with pytest.raises(RefusedError, match="too long"):
        await logged_in(rogue)

    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * oidc.MOST_BYTES


@pytest.mark.parametrize("place", [DISCOVERY, KEYS, TOKEN, USER])
async def test_an_answer_that_drips_is_not_waited_for(
    rogue: Rogue, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "TIMEOUT", 0.5)
    rogue.claims = {"groups": ...}
    rogue.answers[place] = lambda handler: endless(handler, part=b" ", pause=0.1)

    with pytest.raises(RefusedError, match=r"within 0\.5 s"):
        await logged_in(rogue)
