"""A small HTTP server in threads beside the event loop.

In threads, so that it answers for a loop that hangs. A request costs the loop one callback: what is told is asked of
the loop, and turned into text here.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeVar

import structlog
from prometheus_client.exposition import choose_encoder

from relay.engine.node import Node
from relay.errors import DeadlineError, ListenError
from relay.http.backlog import Backlog
from relay.http.metrics import Seen, look, registry
from relay.settings import Settings

log = structlog.get_logger(__name__)

LOOP_ANSWERS_WITHIN = 5.0  # seconds; it is never busy for a tenth of that
CLIENT_TIMEOUT = 5.0  # seconds for a client to send its request and to take the answer
PLAIN = "text/plain; charset=utf-8"

Given = TypeVar("Given")
Answer = tuple[int, str, bytes]  # status, content type, body


@asynccontextmanager
async def answering(settings: Settings, node: Node) -> AsyncIterator[None]:
    """Answer requests about the node meanwhile, if the settings name an address.

    Raises:
        ListenError: the address cannot be had.
    """
    if not settings.http.listen:
        yield
        return
    backlog = Backlog(settings.database)
    server = _listen(settings.http.listen, Answers(asyncio.get_running_loop(), node, backlog))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True)
    thread.start()
    log.info("http.listening", address=settings.http.listen)
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await backlog.close()


class Answers:
    """What is answered to each path. Called in threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, node: Node, backlog: Backlog) -> None:
        self._loop = loop
        self._node = node
        self._backlog = backlog
        self._registry = registry(self._look)

    def live(self) -> Answer:
        """The event loop answers; whether anything can be delivered is another question, and no restart helps."""
        self._ask(self._hindrances)
        return 200, PLAIN, b"ok\n"

    def ready(self, query: str) -> Answer:
        """Lanes and both connections are there, and it is not draining; else why not, one reason a line."""
        hindrances = self._ask(self._hindrances)
        if query == "standby=ok":
            hindrances.pop("lanes", None)
        if not hindrances:
            return 200, PLAIN, b"ok\n"
        return 503, PLAIN, "".join(f"{part}: {reason}\n" for part, reason in sorted(hindrances.items())).encode()

    def metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return 200, content_type, encode(self._registry)

    def _look(self) -> Seen:
        return self._ask(lambda: look(self._node, self._backlog))

    async def _hindrances(self) -> dict[str, str]:
        return self._node.hindrances()

    def _ask(self, question: Callable[[], Coroutine[Any, Any, Given]]) -> Given:
        """Let the event loop answer.

        Raises:
            DeadlineError: it hangs.
        """
        asked = asyncio.run_coroutine_threadsafe(question(), self._loop)
        try:
            return asked.result(LOOP_ANSWERS_WITHIN)
        except TimeoutError:
            asked.cancel()
            raise DeadlineError("the relay's event loop", LOOP_ANSWERS_WITHIN) from None


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, answers: Answers) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.answers = answers
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        # A client that went away; the usual words are a traceback on stderr, in the middle of a log of JSON.
        log.debug("http.request_failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT
    server: _Server

    def do_GET(self) -> None:
        try:
            status, content_type, body = self._answer()
        except DeadlineError as error:
            status, content_type, body = 503, PLAIN, f"{error}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "relay"

    def log_message(self, *_: object) -> None:
        """Log no request: probes come every second."""

    def _answer(self) -> Answer:
        answers = self.server.answers
        path, _, query = self.path.partition("?")
        match path:
            case "/livez":
                return answers.live()
            case "/readyz":
                return answers.ready(query)
            case "/metrics":
                return answers.metrics(self.headers.get("Accept", ""))
            case _:
                return 404, PLAIN, b"there are /livez, /readyz and /metrics\n"


def _listen(address: str, answers: Answers) -> _Server:
    host, _, port = address.rpartition(":")
    try:
        return _Server(host.strip("[]"), int(port), answers)
    except OSError as error:
        raise ListenError(address, error.strerror or str(error)) from error
