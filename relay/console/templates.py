"""Pages from templates: every value is escaped."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay import __version__
from relay.config.settings import Authentication
from relay.console.access.cookie import browser_of, new_browser, set_cookie
from relay.console.access.identity import door_of
from relay.console.formats import chosen, duration, job_mood, marked, moment, number, short, size, utc
from relay.console.forms import Forms, Returned, address_of, returned_form
from relay.console.place import Location
from relay.jobs.words import how_far, outcome_of, share_of, speed_words, state_of
from relay.operate.status import lane_ranges

ERROR = "error.html"
FOLDER = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"

# In the order of the menu: groups of paths with their titles.
MENU = (
    (
        "Operate",
        (
            ("/", "Overview"),
            ("/failures", "Failures"),
            ("/jobs", "Jobs"),
            ("/messages", "Messages"),
            ("/routes", "Routes"),
            ("/replay", "Replay"),
        ),
    ),
    (
        "Data",
        (
            ("/reconcile", "Reconcile"),
            ("/batches", "Batches"),
            ("/retention", "Retention"),
            ("/audit", "Audit"),
        ),
    ),
    (
        "System",
        (
            ("/nodes", "Nodes"),
            ("/consumers", "Consumers"),
            ("/doctor", "Doctor"),
            ("/runbooks", "Runbooks"),
        ),
    ),
)
WITH_LOGIN = (Authentication.PASSWORD, Authentication.OIDC)

_environment = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "chosen": chosen,
    "duration": duration,
    "how_far": how_far,
    "lanes": lane_ranges,
    "marked": marked,
    "moment": moment,
    "mood": job_mood,
    "number": number,
    "outcome": outcome_of,
    "share": share_of,
    "short": short,
    "size": size,
    "speed": speed_words,
    "state": state_of,
    "utc": utc,
}


class Frame(Protocol):
    """What each page says around its subject: `relay.console.site.Site`."""

    def place(self) -> Location:
        """Return where the operator is."""

    def mood(self) -> str:
        """Return how the outbox is, as its icon shows it."""

    @property
    def paused_jobs(self) -> int:
        """How many jobs wait for an operator."""

    @property
    def failed_messages(self) -> int:
        """How many messages have failed, as the page Failures lists them."""


def fragment(name: str, **values: Any) -> str:
    """Return the part of a page that a template makes of these values."""
    return _environment.get_template(name).render(**values)


def present() -> str:
    """Return the console's time, by which a page tells ages."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def page(
    request: Request, template: str, /, *, code: int = 200, returned: Returned | None = None, **values: Any
) -> HTMLResponse:
    """Return the page that a template makes of these values.

    The template also has the user and the menu. A browser without our cookie gets one, which its forms need.

    Args:
        returned: a form that comes back with what was typed.
    """
    console = door_of(request).console
    frame: Frame = request.app.state.site
    identity = getattr(request.state, "identity", None)
    returned = returned or returned_form(request)
    common = {
        "identity": identity,
        "now": present(),
        "has_logout": console.authentication in WITH_LOGIN,
        "base": console.base,
        "menu": MENU,
        "mood": frame.mood() if identity else "",
        "paused_jobs": frame.paused_jobs,
        "failed_messages": frame.failed_messages,
        "path": request.url.path,
        "place": frame.place(),
        "read_only": console.read_only,
        "version": __version__,
        "forms": Forms(address_of(request), returned),
    }
    text = _environment.get_template(template).render({**common, **values})
    if returned is not None and template != ERROR and (unplaced := returned.unplaced):
        returned.words = "; ".join(filter(None, (returned.words, unplaced)))
        text = _environment.get_template(template).render({**common, **values})
    if returned is not None and template != ERROR and not returned.is_shown:  # the page has this form no more
        text = _environment.get_template(ERROR).render(**common, title=returned.title, words=returned.words)
    response = HTMLResponse(text, code)
    if browser_of(request) is None:
        set_cookie(request, response, new_browser())
    return response


def landing(request: Request, address: str) -> HTMLResponse:
    """Return a page that opens a path of this console.

    For a browser that another site has sent: it keeps the session's cookie back until a page of ours asks.
    """
    base = door_of(request).console.base
    text = _environment.get_template("landing.html").render(base=base, address=address)
    return HTMLResponse(text)
