"""A form that could not be done comes back with all that was typed, each error next to its field.

Each form of a page has a name, and says of which page it is (templates/form.html). What its request cannot do is
answered by that page again (answers.py), with the form as it was sent.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from relay.errors import UsageError

PAGE, FORM, TOKEN = "page", "form", "once"  # the hidden fields that each form has
NO_FORMS = ("/api/", "/login", "/logout")
URLENCODED = "application/x-www-form-urlencoded"
LOCAL = re.compile(r"/(?![/\\])[^\\\x00-\x1f]*")  # a path of this console, and no other host
TOKEN_FORM = re.compile(r"([0-9]{1,12})\.[A-Za-z0-9_-]{22}")
TOKEN_AGE = 23 * 3600  # seconds; what was answered to a token is kept for a day (repeats.py)


class InputError(UsageError):
    """What is wrong with one field of a form; nothing was done."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(words)
        self.name = name


def said(why: str) -> str:
    """Return why something changes; InputError when nobody has said it."""
    if not why:
        raise InputError("why", "say why: the audit keeps it")
    return why


@dataclass(slots=True)
class Returned:
    """A form as it was sent, and what is wrong with it.

    Attributes:
        errors: by field.
        words: what is wrong with all of it; empty where the errors say all.
        title: of a page that has no such form.
        is_shown: the page has this form.
        placed: fields next to which the page says what is wrong.
    """

    page: str
    form: str
    values: Mapping[str, Sequence[str]]
    errors: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    title: str = ""
    is_shown: bool = False
    placed: set[str] = field(default_factory=set)

    @property
    def typed(self) -> list[tuple[str, str]]:
        """What was sent, for a page that has no such form."""
        return [(name, value) for name, values in self.values.items() for value in values if value.strip()]

    @property
    def unplaced(self) -> str:
        """What is wrong with fields that nobody types, or that the page does not have."""
        return "; ".join(words for name, words in self.errors.items() if name not in self.placed)


class Form:
    """One form of a page, as its template writes it: empty, or as it was sent."""

    def __init__(self, name: str, page: str, returned: Returned | None) -> None:
        self.name = name
        self.page = page
        self.returned = returned
        self._is_focused = False

    @property
    def words(self) -> str:
        """What is wrong with the form, but for what stands next to its fields."""
        return self.returned.words if self.returned else ""

    @property
    def token(self) -> str:
        """A new token, by which a form that is sent twice is known (repeats.py)."""
        return new_token()

    def error(self, name: str) -> str:
        """Return what is wrong with a field, for a place next to it."""
        if self.returned is None:
            return ""
        self.returned.placed.add(name)
        return self.returned.errors.get(name, "")

    def id(self, name: str) -> str:
        """Return the id of a field's element."""
        return f"{self.name}-{name}"

    def value(self, name: str, default: str = "") -> str:
        """Return what stands in a field."""
        if self.returned is None:
            return default
        return next(iter(self.returned.values.get(name, ())), "")

    def is_checked(self, name: str, value: str, *, default: bool = False) -> bool:
        """Whether a box is ticked."""
        return default if self.returned is None else value in self.returned.values.get(name, ())

    def takes_focus(self) -> bool:
        """Whether this is the first place that needs the operator; call it in the page's order."""
        is_first = not self._is_focused
        self._is_focused = True
        return is_first


class Forms:
    """The forms of one page.

    Args:
        page: its address.
    """

    def __init__(self, page: str, returned: Returned | None) -> None:
        self.returned = returned
        self._page = page

    def of(self, name: str) -> Form:
        """Return the form of this name."""
        returned = self.returned if self.returned and self.returned.form == name else None
        if returned is not None:
            returned.is_shown = True
        return Form(name, self._page, returned)


def address_of(request: Request) -> str:
    """Return path and query of a page."""
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def returned_form(request: Request) -> Returned | None:
    """Return the form that a page brings back; None: it brings back no form."""
    returned: Returned | None = getattr(request.state, "returned", None)
    return returned


def is_local(path: str) -> bool:
    """Whether this is a path of this console."""
    return LOCAL.fullmatch(path) is not None


def is_form(request: Request) -> bool:
    """Whether a page's form was sent, and not a login: its password is never shown."""
    kind, path = request.headers.get("Content-Type", ""), request.url.path
    return request.method == "POST" and kind.startswith(URLENCODED) and not path.startswith(NO_FORMS)


async def sent_form(request: Request) -> Returned | None:
    """Return the form that a request has sent; None where it has sent no form of a page."""
    if not is_form(request):
        return None
    values: dict[str, list[str]] = {}
    for name, value in (await request.form()).multi_items():
        if isinstance(value, str):
            values.setdefault(name, []).append(value)
    page, form = (values.pop(name, [""])[0] for name in (PAGE, FORM))
    values.pop(TOKEN, None)
    return Returned(page if is_local(page) else "", form, values)


def new_token() -> str:
    """Return a token that says when it was made."""
    return f"{int(time.time())}.{secrets.token_urlsafe(16)}"


def check_token(token: str) -> str:
    """Return a token of ours that is young enough for its answer to be kept.

    Raises:
        UsageError: it is too old, or no page of ours has made it.
    """
    found = TOKEN_FORM.fullmatch(token)
    if found is None or not 0 <= time.time() - int(found[1]) + 60 < TOKEN_AGE:
        raise UsageError("this page was opened long ago: see what it says now, and send the form again")
    return token
