"""A private PgBouncer in front of a private PostgreSQL."""

import signal
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from relay.testing.servers.postgres import UNPRIVILEGED, PostgresServer
from relay.testing.servers.process import Process, free_port, is_listening
from relay.testing.servers.server import PrivateServer

PROGRAM = Path("/usr/sbin/pgbouncer")

# auth_type any: every client is let in, as the superuser.
CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
"""


class PoolMode(StrEnum):
    """How long a client keeps a server's session."""

    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"


class PgBouncer(PrivateServer):
    """One pooler; `with PgBouncer(server, PoolMode.SESSION) as pooler:` starts it, and stops it with the block."""

    IN_ORDER = signal.SIGTERM

    def __init__(self, server: PostgresServer, mode: PoolMode, *, size: int = 20) -> None:
        super().__init__(None)
        self._server = server
        self._mode = mode
        self._size = size

    def url(self, url: str) -> str:
        """Return a URL that leads through the pooler to a database of the server."""
        return url.replace(f":{self._server.port}/", f":{self.port}/")

    def start(self) -> None:
        self._process = Process(
            [PROGRAM, self._folder / "pgbouncer.ini"],
            log=self._folder / "pgbouncer.log",
            folder=Path("/"),
            user=UNPRIVILEGED,
        )
        self._process.wait_until(lambda: is_listening(self.port), 10)

    def _prepare(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        server = urlsplit(self._server.admin_url)
        file = folder / "pgbouncer.ini"
        file.write_text(
            CONFIGURATION.format(
                port=server.port,
                user=server.username,
                password=server.password,
                own_port=self.port,
                mode=self._mode,
                size=self._size,
            )
        )
        file.chmod(0o644)  # it runs as another user


def is_installed() -> bool:
    """Whether PgBouncer is installed."""
    return PROGRAM.exists()
