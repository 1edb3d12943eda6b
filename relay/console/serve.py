"""Run the console until it is told to stop."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console.access.requirements import check_access
from relay.console.app import make_app
from relay.console.connections import LimitedProtocol
from relay.console.database import INBOX_URL, inbox_of
from relay.console.sampler import Sampler
from relay.console.site import Site
from relay.console.webhook import address_of
from relay.errors import ConfigurationError, UnavailableError
from relay.logger import get_logger
from relay.operate.reconcile.inbox import OWN, of_inbox
from relay.runtime.listen import listen
from relay.runtime.stopping import stopped_by_signals
from relay.servers.postgres.database import refuse_pooler
from relay.servers.rabbitmq.hosts import broker_urls

WAITING = 128  # clients that the kernel keeps until they are accepted
GOODBYE = 5  # seconds for the requests that are being answered

log = get_logger(__name__)


async def serve(settings: Settings, file: Path | None, show: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT.

    Args:
        show: gets the address to open, if it has a token. A log does not have it, as others may read that.

    Raises:
        ConfigurationError: a server has no URL, or a pooler lends the database's sessions out. The address cannot be
            had, or would let in users whom nobody has authenticated.
    """
    check_access(settings.console)
    await _refuse_poolers(settings)
    broker_urls(settings.broker)
    listener = _listener(settings.console.listen)
    app = make_app(settings, file)
    site: Site = app.state.site
    server = Server(served(app))
    stopping = asyncio.Event()
    running = asyncio.create_task(server.serve([listener]), name="console")
    with stopped_by_signals(lambda _: stopping.set(), running):
        log.info("console.listening", address=settings.console.listen)
        if site.access.start is not None:
            show(site.access.start.address(address_of(settings.console)))
        ending = asyncio.create_task(_end(stopping, site.sampler, server), name="ending")
        try:
            await running
        finally:
            ending.cancel()


async def _refuse_poolers(settings: Settings) -> None:
    """Raise ConfigurationError if a pooler lends the sessions out; a database that is unreachable is not waited for."""
    for database, url in ((settings.database, OWN), (inbox_of(settings), INBOX_URL)):
        if database is not None:
            with suppress(UnavailableError), of_inbox(url):
                await refuse_pooler(database)


def served(app: FastAPI) -> uvicorn.Config:
    """Return how the console is served."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GOODBYE,
    )


async def _end(stopping: asyncio.Event, sampler: Sampler, server: uvicorn.Server) -> None:
    """Once told, end the streams of figures, then the server, which waits for each connection."""
    await stopping.wait()
    await sampler.stop()
    server.should_exit = True


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `relay.runtime.stopping`: uvicorn ends the process by the signal that it got."""
        yield


def _listener(address: str) -> socket.socket:
    """Return the socket of an address, `host:port` or `[host]:port`; raises ConfigurationError."""
    try:
        return listen(address, WAITING)
    except OSError as error:
        raise ConfigurationError(
            f"console.listen = {address}: {error.strerror or error}; name another address (RELAY_CONSOLE_LISTEN)"
        ) from error
