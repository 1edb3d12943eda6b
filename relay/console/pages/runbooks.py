"""`/runbooks`: what each reason and each alert means, and what to do."""

import re
from collections.abc import Iterable, Iterator
from posixpath import normpath

from fastapi import APIRouter
from markdown_it import MarkdownIt
from markdown_it.token import Token
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.given import Viewer
from relay.console.site import site_of
from relay.console.templates import page
from relay.errors import NotFoundError
from relay.operate import packaged

router = APIRouter()

INDEX = "README"
PAGE = re.compile(r"(\w+)\.md")  # as a link of a runbook names another one
# What may be wider than the window scrolls, so the keyboard has to reach it.
SCROLLING = {
    "<pre>": '<pre tabindex="0">',
    "<table>": '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>',
    "</table>": "</table></div>",
}

_markdown = MarkdownIt("commonmark", {"html": False}).enable("table")


@router.get("/runbooks")
def index(request: Request, _: Viewer) -> HTMLResponse:
    """List the runbooks by fault."""
    return _page(request, INDEX)


@router.get("/runbooks/{runbook}")
def show(request: Request, runbook: str, _: Viewer) -> HTMLResponse:
    """Show one runbook."""
    return _page(request, runbook)


def _page(request: Request, name: str) -> HTMLResponse:
    text = packaged.runbook(name)
    if text is None:
        raise NotFoundError("there is no such runbook: /runbooks lists them")
    is_index = name == INDEX
    title = "Runbooks" if is_index else name
    base = site_of(request).settings.console.base
    return page(request, "runbook.html", title=title, is_index=is_index, text=as_html(text, base))


def as_html(text: str, base: str = "") -> str:
    """Return a runbook as HTML; HTML in it is shown as text. `base` stands before each link."""
    tokens = _markdown.parse(text)
    for token in tokens:
        token.children = [*_links(token.children, base)] if token.children else token.children
    html: str = _markdown.renderer.render(tokens, _markdown.options, {})
    for plain, scrolling in SCROLLING.items():
        html = html.replace(plain, scrolling)
    return html


def _links(tokens: Iterable[Token], base: str) -> Iterator[Token]:
    """Yield the tokens with links to other runbooks of the console. Another page of the docs is named, and no link."""
    named = ""
    for token in tokens:
        if token.type == "link_open":
            target = str(token.attrs["href"]).partition("#")[0]
            named = "" if (found := PAGE.fullmatch(target)) else target
            if found:
                token.attrs["href"] = f"{base}/runbooks/{found[1]}"
                yield token
        elif token.type == "link_close" and named:
            yield Token("text", "", 0, content=f" ({normpath(f'docs/runbooks/{named}')})")
        else:
            yield token
