"""With sslmode=verify-full PostgreSQL is who the URL names; what is less lets others in between."""

import asyncio
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode

import psycopg
import pytest
from adbc_driver_postgresql import dbapi
from pydantic import SecretStr

from outbox_spark.connection import conninfo as spark_conninfo
from relay.config.settings import DatabaseSettings
from relay.errors import DatabaseUnavailableError
from relay.servers.postgres.database import connect, connect_async
from relay.testing.servers.postgres import PostgresServer
from tests.support.certificates import Authority, Certificate
from tests.support.eventually import eventually
from tests.tls.conftest import DATABASE, ROLE, TlsPostgres, as_certified

Connect = Callable[[str], None]

SSL_REQUEST = 80877103

BY_RELAY = """
import sys
from relay.servers.postgres.database import connect
from relay.config.settings import DatabaseSettings
connect(DatabaseSettings(url=sys.argv[1]))
"""
BY_SPARK = """
import sys
from outbox_spark.connection import connect, conninfo
connect(conninfo(sys.argv[1]))
"""


def settings(url: str) -> DatabaseSettings:
    return DatabaseSettings(url=SecretStr(url))


def by_relay(url: str) -> None:
    connect(settings(url)).close()


def by_spark_driver(url: str) -> None:
    psycopg.connect(spark_conninfo(url)).close()


def by_spark_executor(url: str) -> None:
    dbapi.connect(spark_conninfo(url), autocommit=True).close()


CLIENTS = pytest.mark.parametrize("enter", [by_relay, by_spark_driver, by_spark_executor])


def named(server: PostgresServer, name: str = DATABASE, **parameters: object) -> str:
    """Return a URL of the server by this name."""
    url = server.admin_url.replace("127.0.0.1", name)
    return f"{url}?{urlencode({'hostaddr': '127.0.0.1', **parameters})}"


@CLIENTS
def test_the_certificate_of_the_name_and_of_the_authority_is_let_in(
    tls_postgres: TlsPostgres, authority: Authority, enter: Connect
) -> None:
    enter(named(tls_postgres, sslmode="verify-full", sslrootcert=authority.file))


@CLIENTS
def test_a_certificate_for_another_name_is_refused(
    tls_postgres: TlsPostgres, authority: Authority, enter: Connect
) -> None:
    with pytest.raises(Exception, match=f'"{DATABASE}" does not match host name "other.test"'):
        enter(named(tls_postgres, "other.test", sslmode="verify-full", sslrootcert=authority.file))


@CLIENTS
@pytest.mark.parametrize("mode", ["verify-full", "verify-ca", "require"])
def test_a_certificate_of_another_authority_is_refused(
    tls_postgres: TlsPostgres, stranger: Authority, enter: Connect, mode: str
) -> None:
    with pytest.raises(Exception, match="certificate verify failed"):
        enter(named(tls_postgres, sslmode=mode, sslrootcert=stranger.file))


@CLIENTS
def test_a_server_without_tls_is_refused(postgres: PostgresServer, authority: Authority, enter: Connect) -> None:
    for mode in ("verify-full", "require"):
        with pytest.raises(Exception, match="server does not support SSL, but SSL was required"):
            enter(f"{postgres.admin_url}?{urlencode({'sslmode': mode, 'sslrootcert': authority.file})}")


@CLIENTS
def test_a_certificate_takes_the_place_of_a_password(
    tls_postgres: TlsPostgres, authority: Authority, certified: Certificate, enter: Connect
) -> None:
    enter(as_certified(tls_postgres, authority, certified))


@CLIENTS
def test_a_key_is_decrypted_with_sslpassword(tls_postgres: TlsPostgres, authority: Authority, enter: Connect) -> None:
    locked = authority.issue(ROLE, passphrase="sesame")

    enter(as_certified(tls_postgres, authority, locked, sslpassword="sesame"))
    with pytest.raises(Exception, match="could not load private key file"):
        enter(as_certified(tls_postgres, authority, locked, sslpassword="another"))


@pytest.mark.parametrize("program", [BY_RELAY, BY_SPARK], ids=["relay", "spark"])
def test_nobody_is_asked_for_the_passphrase_of_a_key(
    tls_postgres: TlsPostgres, authority: Authority, program: str
) -> None:
    locked = authority.issue(ROLE, passphrase="sesame")

    # Without a terminal OpenSSL reads what it asks for from stdin.
    done = subprocess.run(
        [sys.executable, "-c", program, as_certified(tls_postgres, authority, locked)],
        input="sesame\n",
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )

    assert "could not load private key file" in done.stderr
    assert "pass phrase" not in done.stdout + done.stderr


def test_a_client_without_the_certificate_that_is_demanded_is_refused(
    tls_postgres: TlsPostgres, authority: Authority, certified: Certificate, stranger: Authority
) -> None:
    url = as_certified(tls_postgres, authority, certified)
    foreign = stranger.issue(ROLE)

    with pytest.raises(DatabaseUnavailableError, match="connection requires a valid client certificate"):
        by_relay(f"{url}&sslcertmode=disable")
    with pytest.raises(DatabaseUnavailableError, match=r"unknown ca|closed the connection|reset"):
        by_relay(as_certified(tls_postgres, authority, foreign))


def test_a_key_that_others_may_read_is_refused(
    tls_postgres: TlsPostgres, authority: Authority, certified: Certificate, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(certified.key.read_text())
    key.chmod(0o644)

    with pytest.raises(DatabaseUnavailableError, match=f'private key file "{key}" has group or world access'):
        by_relay(as_certified(tls_postgres, authority, certified, sslkey=key))


def test_the_authorities_of_the_system_are_those_of_a_variable(
    tls_postgres: TlsPostgres, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = named(tls_postgres, sslrootcert="system")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(DatabaseUnavailableError, match="certificate verify failed"):
        by_relay(url)

    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    by_relay(url)


def test_renewed_files_are_in_use_from_the_next_connection_on(
    tls_postgres: TlsPostgres, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    trusted = tmp_path / "ca.crt"
    trusted.write_text(stranger.file.read_text())
    kept = settings(named(tls_postgres, sslmode="verify-full", sslrootcert=trusted))
    with pytest.raises(DatabaseUnavailableError, match="certificate verify failed"):
        connect(kept)

    trusted.write_text(stranger.file.read_text() + authority.file.read_text())

    connect(kept).close()


async def test_a_connection_outlives_the_certificate_that_it_began_with(
    tls_postgres: TlsPostgres, authority: Authority, stranger: Authority
) -> None:
    database = settings(named(tls_postgres, sslmode="verify-full", sslrootcert=authority.file))
    async with await connect_async(database) as connection:
        tls_postgres.use(stranger.issue(DATABASE))
        await connection.execute("SELECT pg_reload_conf()")
        try:
            await eventually(lambda: not is_let_in(database), "the server shows its new certificate")

            await connection.execute("SELECT 1")
        finally:
            tls_postgres.use(authority.issue(DATABASE))
            await connection.execute("SELECT pg_reload_conf()")
            await eventually(lambda: is_let_in(database), "the server shows the certificate of the others")


def is_let_in(database: DatabaseSettings) -> bool:
    try:
        connect(database).close()
    except DatabaseUnavailableError:
        return False
    return True


class Impostor:
    """Takes the server's place, with its own certificate or without TLS, and asks for the password itself."""

    def __init__(self, certificate: Certificate | None) -> None:
        self.passwords: list[str] = []
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if certificate else None
        if self._tls and certificate:
            self._tls.load_cert_chain(*certificate)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size, code = struct.unpack("!II", await reader.readexactly(8))
                await reader.readexactly(size - 8)
                if code >> 16 == 3:  # the version of the protocol: a startup message
                    break
                if code == SSL_REQUEST and self._tls:
                    writer.write(b"S")
                    await writer.start_tls(self._tls)
                else:
                    writer.write(b"N")
            writer.write(struct.pack("!cII", b"R", 8, 3))  # AuthenticationCleartextPassword
            _, size = struct.unpack("!cI", await reader.readexactly(5))
            self.passwords.append((await reader.readexactly(size - 4)).rstrip(b"\0").decode())
        except (asyncio.IncompleteReadError, OSError):  # the client has gone
            pass
        finally:
            writer.close()


@asynccontextmanager
async def impostor(certificate: Certificate | None) -> AsyncIterator[tuple[Impostor, int]]:
    caught = Impostor(certificate)
    async with await asyncio.start_server(caught.serve, "127.0.0.1", 0) as server:
        yield caught, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("parameters", "without_tls", "with_tls"),
    [
        ("", True, True),
        ("sslmode=prefer", True, True),
        ("sslmode=prefer&require_auth=scram-sha-256", False, False),
        ("sslmode=prefer&channel_binding=require", False, False),
        ("sslmode=require", False, True),
        ("sslmode=require&sslrootcert=/missing", False, True),
        ("sslmode=require&channel_binding=require", False, False),
        ("sslmode=require&sslrootcert={authority}", False, False),
        ("sslmode=verify-full&sslrootcert={authority}", False, False),
    ],
)
async def test_a_server_in_between_gets_the_password_unless_the_url_forbids_it(
    authority: Authority,
    stranger: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: str,
    without_tls: bool,
    with_tls: bool,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose authorities libpq would trust
    query = parameters.format(authority=authority.file)
    for certificate, is_caught in ((None, without_tls), (stranger.issue("impostor"), with_tls)):
        async with impostor(certificate) as (caught, port):
            with pytest.raises(DatabaseUnavailableError):
                await connect_async(settings(f"postgresql://relay:hunter2@127.0.0.1:{port}/app?{query}"))

        assert caught.passwords == (["hunter2"] if is_caught else [])


@CLIENTS
def test_a_server_that_proves_that_it_knows_the_password_is_let_in(tls_postgres: TlsPostgres, enter: Connect) -> None:
    enter(named(tls_postgres, sslmode="require", channel_binding="require", require_auth="scram-sha-256"))
