"""The path below which a proxy shows the console, as in `https://example.org/relay`.

Behind this, paths begin with `/` as they do elsewhere: no route and no redirect knows the other path. Pages write it
before their links (`base` in the templates).
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BelowApp:
    """The app as it is seen below a path. A proxy may take the path away from what it passes on, or leave it.

    Args:
        base: the path, as in `/relay`.
    """

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_below(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if (to := headers.get("Location", "")).startswith("/"):
                    headers["Location"] = self._base + to
            await send(message)

        path: str = scope["path"]
        if path == self._base or path.startswith(f"{self._base}/"):
            scope = {**scope, "path": path.removeprefix(self._base) or "/"}
        await self._app(scope, receive, send_below)
