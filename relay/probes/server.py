"""A small HTTP server for probes and metrics, in a thread with its own event loop.

In a thread, so that it answers for a main loop that hangs. A request costs the main loop one callback: the thread asks
it for the figures, and makes text of them. Slow clients cost neither threads nor the relay's file descriptors. The
number of connections is bounded, the oldest ones make room for new ones, and each has a deadline.
"""

import asyncio
import re
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import relay
from relay.errors import DeadlineError, ListenError
from relay.logger import get_logger
from relay.runtime.hindrance import Hindrance
from relay.runtime.listen import listen

log = get_logger(__name__)

LOOP_ANSWERS_WITHIN = 5.0  # seconds; it is never busy for a tenth of that
REQUEST_TIMEOUT = 5.0  # seconds for a client to send its whole request
ANSWER_TIMEOUT = 5.0  # seconds for a client to take the whole answer
MOST_CONNECTIONS = 100
SHARE = 4  # connections take at most this part of the process's file descriptors: the others are the relay's own
MOST_LINE, MOST_HEAD = 8 * 1024, 16 * 1024  # bytes of the request line, and of all up to the empty line
MOST_DISCARDED = 256 * 1024  # bytes behind the request that are read and thrown away
WAITING = 1024  # clients that the kernel keeps until they are accepted
ACCEPT_AGAIN = 0.05  # seconds, when there was no file descriptor for a client
PLAIN = "text/plain; charset=utf-8"
PATHS = ("/livez", "/readyz", "/metrics")

END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
REQUEST_LINE = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/1\.[01]")
HEADER = re.compile(rb"[!-9;-~]+:[\t -~\x80-\xff]*")

Given = TypeVar("Given")


class Answer(NamedTuple):
    """What a client gets; the server adds the usual headers."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: str = ""


class Request(NamedTuple):
    """What the server reads of a request."""

    method: str
    path: str
    query: str
    accept: str


class Subject(Protocol):
    """The relay or consumer that is asked about; asked on the event loop, where nothing else changes its figures
    meanwhile.
    """

    def hindrances(self, query: str) -> Mapping[str, Hindrance]:
        """Return what keeps it from its work at this moment, by part; nothing when it can. `query` is the URL's."""

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
    with _listener(address) as listener:
        server = _Server(listener, _Answers(asyncio.get_running_loop(), subject), _room())
        log.info("http.listening", address=address)
        try:
            yield
        finally:
            await asyncio.to_thread(server.stop)


def _listener(address: str) -> socket.socket:
    try:
        listener = listen(address, WAITING)
    except OSError as error:
        raise ListenError(address, error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener


def _room() -> int:
    """Return how many clients may be connected at once, and warn when these are few."""
    room = share_of_descriptors(MOST_CONNECTIONS)
    if room < MOST_CONNECTIONS:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.warning("http.few_descriptors", limit=limit, wanted=SHARE * MOST_CONNECTIONS, connections=room)
    return room


def share_of_descriptors(most: int) -> int:
    """Return how many connections a server may take of the process's file descriptors: at most so many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // SHARE))


class _Answers:
    """What is answered to each request. Called in the server's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, subject: Subject) -> None:
        self._loop = loop
        self._subject = subject
        self._process = ProcessCollector(registry=None)

    async def to(self, request: Request) -> Answer:
        """Return the answer to a request."""
        if request.path not in PATHS:
            return Answer(HTTPStatus.NOT_FOUND, b"there are /livez, /readyz and /metrics\n")
        if request.method not in ("GET", "HEAD"):
            refusal = b"this path answers GET and HEAD\n"
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, refusal, headers="Allow: GET, HEAD\r\n")
        try:
            match request.path:
                case "/livez":
                    return await self._live()
                case "/readyz":
                    return await self._ready(request.query)
                case _:
                    return await self._metrics(request.accept)
        except DeadlineError as error:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())

    async def _live(self) -> Answer:
        """The event loop answers; whether anything can be done is another question, and no restart helps."""
        await self._ask(self._hindrances(""))
        return Answer(HTTPStatus.OK, b"ok\n")

    async def _ready(self, query: str) -> Answer:
        """Nothing hinders the subject; else the parts that do, each with its public reason.

        The reasons themselves name hosts, ports and users. They are in the log, and not for strangers.
        """
        hindrances = await self._ask(self._hindrances(query))
        if not hindrances:
            return Answer(HTTPStatus.OK, b"ok\n")
        parts = "".join(f"{part}: {reason.public}\n" for part, reason in sorted(hindrances.items()))
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, parts.encode())

    async def _metrics(self, accept: str) -> Answer:
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # the library compares a version that is no number
            encode, content_type = choose_encoder("")
        metrics = await self._ask(self._subject.look())
        build = InfoMetricFamily("outbox_build", "Release of outbox-relay that runs here")
        build.add_metric([], {"version": relay.__version__})
        body = encode(_Collected([build, *metrics(), *self._process.collect()]))
        return Answer(HTTPStatus.OK, body, content_type)

    async def _hindrances(self, query: str) -> Mapping[str, Hindrance]:
        return self._subject.hindrances(query)

    async def _ask(self, question: Coroutine[Any, Any, Given]) -> Given:
        """Let the main loop answer.

        Raises:
            DeadlineError: it hangs.
        """
        asked = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))
        try:
            async with asyncio.timeout(LOOP_ANSWERS_WITHIN):
                return await asked
        except TimeoutError:
            raise DeadlineError("the event loop", LOOP_ANSWERS_WITHIN) from None


class _Collected(Collector):
    """Metrics of one moment, in the shape that the encoders take."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _Server:
    """Accepts clients in a thread until `stop`."""

    def __init__(self, listener: socket.socket, answers: _Answers, room: int) -> None:
        self._listener = listener
        self._answers = answers
        self._room = room
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._loop = asyncio.SelectorEventLoop()
        self._accepting = self._loop.create_task(self._accept(), name="http")
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Accept no more and drop the clients; return when the thread has ended."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                await self._wait_for_client()
                continue
            except OSError:  # the client has left, or the process has no file descriptor left
                self._evict()
                await asyncio.sleep(ACCEPT_AGAIN)
                continue
            while len(self._clients) >= self._room:
                self._evict()
            # Ends after a turn of the loop, in which the sockets of evicted clients are closed.
            await self._loop.connect_accepted_socket(self._client, connection)

    async def _wait_for_client(self) -> None:
        """Unlike the loop's `sock_accept`, report no error when this is cancelled while a client comes."""
        has_come = asyncio.Event()
        self._loop.add_reader(self._listener, has_come.set)
        try:
            await has_come.wait()
        finally:
            self._loop.remove_reader(self._listener)

    async def _end(self) -> None:
        while self._clients:
            self._evict()
        await asyncio.sleep(0)  # in which the sockets are closed, and their answers cancelled
        if answering := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(answering)

    def _client(self) -> "_Client":
        client = _Client(self._answers, self._clients)
        self._clients[client] = None
        return client

    def _evict(self) -> None:
        """Drop the client that has sent for longest, else the oldest: a probe sends its request at once."""
        oldest = next((each for each in self._clients if each.is_sending), next(iter(self._clients), None))
        if oldest is not None:
            del self._clients[oldest]
            oldest.drop()


class _Client(asyncio.Protocol):
    """One connection: one request, one answer.

    Attributes:
        is_sending: its request is not complete.
    """

    def __init__(self, answers: _Answers, clients: dict["_Client", None]) -> None:
        self._answers = answers
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None
        self._head = bytearray()
        self._discarded = 0
        self._has_ended = False  # it will send nothing more
        self.is_sending = True

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a socket's"  # noqa: S101
        self._transport = transport
        self._allow(REQUEST_TIMEOUT)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (clients may leave)
        self._clients.pop(self, None)
        for ended in (self._deadline, self._answering):
            if ended is not None:
                ended.cancel()

    def data_received(self, data: bytes) -> None:
        if not self.is_sending:
            # Read and not used: a socket that is closed with unread data takes the answer back.
            self._discarded += len(data)
            if self._discarded > MOST_DISCARDED:
                self.drop()
            return
        searched = max(0, len(self._head) - 3)
        self._head += data
        if end := END_OF_HEAD.search(self._head, searched):
            self._begin(bytes(self._head[: end.start()]))
        elif len(self._head) > MOST_HEAD or (len(self._head) > MOST_LINE and b"\n" not in self._head[:MOST_LINE]):
            self._begin(bytes(self._head))

    def eof_received(self) -> bool:
        self._has_ended = True
        return not self.is_sending and self._answering is not None  # it may still want the answer

    def _begin(self, head: bytes) -> None:
        """The request is complete, or as much of it as is read: answer."""
        self.is_sending = False
        self._allow(LOOP_ANSWERS_WITHIN + ANSWER_TIMEOUT)
        self._answering = asyncio.get_running_loop().create_task(self._answer(head), name="http.answer")

    async def _answer(self, head: bytes) -> None:
        request = read_request(head)
        try:
            answer = request if isinstance(request, Answer) else await self._answers.to(request)
        except Exception:
            log.error("http.request_failed", exc_info=True)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the answer could not be made: see the log\n")
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._allow(ANSWER_TIMEOUT)
        self._answering = None
        is_head = isinstance(request, Request) and request.method == "HEAD"
        transport.write(_head_of(answer) + (b"" if is_head else answer.body))
        if self._has_ended:
            transport.close()
        else:
            transport.write_eof()  # then the client closes

    def _allow(self, seconds: float) -> None:
        """Drop the client in so many seconds from now on, whatever it does."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.drop)


def read_request(head: bytes) -> Request | Answer:
    """Return the request, or the answer to what is no request."""
    line, *fields = head.split(b"\n")
    if len(line) > MOST_LINE:
        return Answer(HTTPStatus.REQUEST_URI_TOO_LONG, b"the request line is too long\n")
    if len(head) > MOST_HEAD:
        return Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the headers are too large\n")
    found = REQUEST_LINE.fullmatch(line.removesuffix(b"\r"))
    headers = [field.removesuffix(b"\r") for field in fields]
    if found is None or not all(HEADER.fullmatch(header) for header in headers):
        return Answer(HTTPStatus.BAD_REQUEST, b"this is no request of HTTP/1.1\n")
    path, _, query = found[2].decode().partition("?")
    named = (header.decode("latin-1").partition(":") for header in headers)
    accept = ",".join(value.strip() for name, _, value in named if name.lower() == "accept")
    return Request(found[1].decode(), path, query, accept)


def _head_of(answer: Answer) -> bytes:
    return (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{answer.headers}"
        "Connection: close\r\n\r\n"
    ).encode("latin-1")
