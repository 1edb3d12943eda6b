"""A small HTTP server in threads beside the event loop.

In threads, so that it answers for a loop that hangs. A request costs the loop one callback: what is told is asked of
the loop, and turned into text here.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import relay
from relay.errors import DeadlineError, ListenError

log = structlog.get_logger(__name__)

LOOP_ANSWERS_WITHIN = 5.0  # seconds; it is never busy for a tenth of that
CLIENT_TIMEOUT = 5.0  # seconds for a client to send its request and to take the answer
PLAIN = "text/plain; charset=utf-8"

Given = TypeVar("Given")
Answer = tuple[int, str, bytes]  # status, content type, body


class Subject(Protocol):
    """Whoever is told about; asked on the event loop, where nothing else changes its figures meanwhile."""

    def hindrances(self, query: str) -> Mapping[str, str]:
        """Say what keeps it from its work at this moment, by part; nothing when it can. `query` is the URL's."""

    async def look(self) -> Callable[[], Iterator[Metric]]:
        """Take the figures; what is given makes metrics of them, in a thread."""


@asynccontextmanager
async def answering(address: str, subject: Subject) -> AsyncIterator[None]:
    """Answer requests about the subject meanwhile.

    Args:
        address: `host:port` or `[host]:port`.

    Raises:
        ListenError: the address cannot be had.
    """
    server = _listen(address, _Answers(asyncio.get_running_loop(), subject))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True)
    thread.start()
    log.info("http.listening", address=address)
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class _Answers(Collector):
    """What is answered to each path. Called in threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, subject: Subject) -> None:
        self._loop = loop
        self._subject = subject
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def live(self) -> Answer:
        """The event loop answers; whether anything can be done is another question, and no restart helps."""
        self._ask(self._hindrances(""))
        return 200, PLAIN, b"ok\n"

    def ready(self, query: str) -> Answer:
        """Nothing hinders the subject; else what does, one reason a line."""
        hindrances = self._ask(self._hindrances(query))
        if not hindrances:
            return 200, PLAIN, b"ok\n"
        return 503, PLAIN, "".join(f"{part}: {reason}\n" for part, reason in sorted(hindrances.items())).encode()

    def metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return 200, content_type, encode(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Take the figures anew at each scrape: whoever is told about does nothing for it."""
        metrics = self._ask(self._subject.look())
        build = InfoMetricFamily("outbox_build", "Release of outbox-relay that runs here")
        build.add_metric([], {"version": relay.__version__})
        yield build
        yield from metrics()

    async def _hindrances(self, query: str) -> Mapping[str, str]:
        return self._subject.hindrances(query)

    def _ask(self, question: Coroutine[Any, Any, Given]) -> Given:
        """Let the event loop answer.

        Raises:
            DeadlineError: it hangs.
        """
        asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return asked.result(LOOP_ANSWERS_WITHIN)
        except TimeoutError:
            asked.cancel()
            raise DeadlineError("the event loop", LOOP_ANSWERS_WITHIN) from None


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, answers: _Answers) -> None:
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


def _listen(address: str, answers: _Answers) -> _Server:
    host, _, port = address.rpartition(":")
    try:
        return _Server(host.strip("[]"), int(port), answers)
    except OSError as error:
        raise ListenError(address, error.strerror or str(error)) from error
