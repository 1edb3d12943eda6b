"""Whatever an address or a form holds, a page answers without a fault, and shows it as text.

The routes and their parameters are those of the app, so that no page can be forgotten.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx
from fastapi import FastAPI
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from relay.config.settings import Settings
from relay.console.app import make_app
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.routes import names, routes
from tests.console.site import serving, session_cookie, users

EXAMPLES = 10  # of each page: several parameters at once
OURS = "relay-fuzz"  # no element and no attribute of a page is called so
PARAMETER = re.compile(r"\{[^}]*\}")
LINKS = ("href", "src", "action", "formaction")
NOT_PAGES = ("/api/", "/live", "/logout")  # schemathesis asks the first; the second never ends; the third is the end
# A form that is taken, until one of its fields becomes hostile.
FORM = {
    "why": "test", "kind": "retry", "queue": "", "lane": "7", "exchange": "", "routing_key": "later", "type": "order",
    "rate": "1", "part": "true", "key": "7",
}  # fmt: skip

# Each parameter gets each of the first; a path, and several parameters at once, get all.
WORST: list[str | bytes] = [
    f"'\"><{OURS} {OURS}=1>", f'" {OURS}="', "//evil.test", "\0", "-1", "9" * 19, "9" * 5_000,
    "0001-01-01T00:00:00+14:00", "99999999999d", "x" * 30_000, b"\xff\xfe",
]  # fmt: skip
HOSTILE = [
    *WORST, f"</script><{OURS}>", f"{{{{7*7}}}}<{OURS}>", "javascript:alert(1)", "/\\evil.test", "https://evil.test",
    "\r\nSet-Cookie: a=b", "", " ", "0", "1", "true", str(2**63), "1e999", "NaN", "1.5", "0x10", "1_0", "٣", "²",
    "1970-01-01", "9999-12-31T23:59:59-14:00", "1d", "-1d", "'; DROP TABLE outbox.message; --", "%", "%s%(x)s{}",
    "é" * 300, "\U0001f600", "\u202e", "\ufeff", "a\nb", "../../x", "x" * 1_001, "20261127.0.1",
    "20261127.4294967294.65535", "1-1-1", "-".join([str(2**62)] * 3), "00000000-0000-0000-0000-000000000000",
    b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80",
]  # fmt: skip
VALUES = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8"), max_size=20) | st.binary(max_size=8)
RAW = st.sampled_from(["%", "%zz", "%u0041", "+", "&&==", "%00"])  # what no browser sends
ENCODED = st.builds(lambda value: quote(value, safe=""), VALUES) | RAW


class Marks(HTMLParser):
    """What an address could have become in a page.

    Attributes:
        found: elements, attributes and links that are not ours.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == OURS:
            self.found.append(tag)
        for name, value in attrs:
            if name == OURS or name.startswith("on") or (name in LINKS and not _is_of_console(value or "/")):
                self.found.append(f"{tag} {name}={value}")


def _is_of_console(link: str) -> bool:
    return link.startswith(("/", "#")) and not link.startswith(("//", "/\\"))


def pages(app: FastAPI, method: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each page, and the names of its parameters: behind the question mark, or of its form."""
    for route in routes(app):
        path, is_asked = route.path or "", method in (route.methods or ())
        if is_asked and not path.startswith(NOT_PAGES):
            yield path, names(route.dependant)


async def test_no_address_breaks_a_page_or_becomes_part_of_it(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    fill(database_url)
    found = list(pages(make_app(settings), "GET"))
    async with serving(settings, **users(tmp_path)) as address:
        cookie = await session_cookie(address, Role.OWNER)
        with httpx.Client(base_url=address, headers={"Cookie": cookie}, timeout=60) as client:
            for path, parameters in found:
                await asyncio.to_thread(_ask_each, client, path, parameters)
                await asyncio.to_thread(_ask_several, client, path, parameters)

    assert {"/", "/messages/{row}", "/login"} <= {path for path, _ in found}
    assert dict(found)["/messages"] == ["state", "id", "type", "key", "event", "since", "until", "after"]


async def test_no_form_breaks_the_console(settings: Settings, tmp_path: Path, database_url: str) -> None:
    fill(database_url)
    found = list(pages(make_app(settings), "POST"))
    async with serving(settings, **users(tmp_path)) as address:
        cookie = await session_cookie(address, Role.OWNER)
        headers = {"Cookie": cookie, "Origin": address}
        with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
            for path, fields in found:
                await asyncio.to_thread(_send_each, client, path.replace("{turn}", "pause"), fields)

    assert {"/routes/{route}/probe", "/routes/lanes/{lane}/resume"} <= {path for path, _ in found}
    assert dict(found)["/routes/pause"] == ["routing_key", "exchange", "why"]


def _send_each(client: httpx.Client, path: str, fields: list[str]) -> None:
    """Send hostile values of each field, and of the path."""
    for name, value in product(fields, WORST):
        _check_sent(client, PARAMETER.sub("1", path), {**FORM, name: value})
    if PARAMETER.search(path):
        for value in HOSTILE:
            _check_sent(client, PARAMETER.sub(quote(value, safe=""), path), FORM)


def _check_sent(client: httpx.Client, target: str, form: Mapping[str, str | bytes]) -> None:
    request = client.build_request("POST", client.base_url.copy_with(raw_path=target.encode()), content=urlencode(form))
    request.headers["Content-Type"] = "application/x-www-form-urlencoded"
    answer = client.send(request)

    assert answer.status_code < 500, (target, form, answer.text)
    assert answer.status_code not in (401, 403), (target, answer.text)
    assert Marks(answer.text).found == [], (target, form)


def _ask_each(client: httpx.Client, path: str, parameters: list[str]) -> None:
    """Ask with hostile values of each parameter, and of the path."""
    for name, value in product(parameters, WORST):
        _check(client, PARAMETER.sub("1", path) + f"?{name}={quote(value, safe='')}")
    if PARAMETER.search(path):
        for value in HOSTILE:
            _check(client, PARAMETER.sub(quote(value, safe=""), path))


def _ask_several(client: httpx.Client, path: str, parameters: list[str]) -> None:
    """Ask with any values of several parameters, some of them twice."""
    name = st.sampled_from([*parameters, "unknown"])

    @budget(max_examples=EXAMPLES, database=None)
    @given(in_path=ENCODED, query=st.lists(st.tuples(name, ENCODED), min_size=1, max_size=4))
    def ask(in_path: str, query: list[tuple[str, str]]) -> None:
        _check(client, PARAMETER.sub(lambda _: in_path, path) + "?" + "&".join(map("=".join, query)))

    ask()


def _check(client: httpx.Client, target: str) -> None:
    answer = client.send(client.build_request("GET", client.base_url.copy_with(raw_path=target.encode())))

    assert answer.status_code < 500, (target, answer.text)
    assert Marks(answer.text).found == [], target
    assert _is_of_console(answer.headers.get("Location", "/")), target
    assert "a=b" not in answer.headers.get("Set-Cookie", ""), target
