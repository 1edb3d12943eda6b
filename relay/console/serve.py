"""Run the console until it is told to stop."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console.access.requirements import check_access
from relay.console.app import make_app
from relay.console.connections import LimitedProtocol
from relay.console.sampler import Sampler
from relay.console.site import Site
from relay.errors import ConfigurationError
from relay.logger import get_logger
from relay.runtime.stopping import stopped_by_signals
from relay.servers.postgres.database import conninfo
from relay.servers.rabbitmq.hosts import broker_urls

GOODBYE = 5  # seconds for the requests that are being answered

log = get_logger(__name__)


async def serve(settings: Settings, file: Path | None, show: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or SIGINT.

    Args:
        show: gets the address to open, if it has a token. A log does not have it, as others may read that.

    Raises:
        ConfigurationError: a server has no URL, or the address cannot be had, or would let in users whom nobody has
            authenticated.
    """
    check_access(settings.console)
    conninfo(settings.database)
    broker_urls(settings.broker)
    listener = listen(settings.console.listen)
    app = make_app(settings, file)
    site: Site = app.state.site
    server = Server(served(app))
    stopping = asyncio.Event()
    running = asyncio.create_task(server.serve([listener]), name="console")
    with stopped_by_signals(lambda _: stopping.set(), running):
        log.info("console.listening", address=settings.console.listen)
        if site.access.start is not None:
            show(site.access.start.address(settings.console.origin or f"http://{settings.console.listen}"))
        ending = asyncio.create_task(_end(stopping, site.sampler, server), name="ending")
        try:
            await running
        finally:
            ending.cancel()


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


def listen(address: str) -> socket.socket:
    """Return the socket of an address, `host:port` or `[host]:port`; raises ConfigurationError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where TCP is named: without it each page but the first of a connection takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"console.listen = {address}: {error.strerror or error}; name another address (RELAY_CONSOLE_LISTEN)"
        ) from error
    return listener
