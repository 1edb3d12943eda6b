"""Servers that speak TLS with an authority of the tests' own, and demand certificates of their clients."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import psycopg
import pytest
from yarl import URL

from relay.testing.servers.postgres import PostgresServer, installed
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import USER, RabbitServer
from tests.support.certificates import Authority, Certificate
from tests.support.names import Names, resolving
from tests.support.releases import OLDEST

BROKER, DATABASE = "rabbit.test", "postgres.test"  # in their certificates
ROLE = "certified"  # let in by a certificate in its name, and by nothing else
HBA = f"""
local   all all    trust
hostssl all {ROLE} 127.0.0.1/32 cert
hostssl all all    127.0.0.1/32 scram-sha-256
"""


class TlsPostgres(PostgresServer):
    """A server that lets nobody in without TLS. It is the oldest release: the wheel of the newest is built without."""

    def __init__(self, authority: Authority) -> None:
        super().__init__(OLDEST, settings={"ssl": "on", "ssl_ca_file": "authority.crt"})
        self._authority = authority

    def _prepare(self, folder: Path) -> None:
        super()._prepare(folder)
        self._write(self._data / "authority.crt", self._authority.file.read_text())
        self.use(self._authority.issue(DATABASE))
        self._write(self._data / "pg_hba.conf", HBA)

    def use(self, certificate: Certificate) -> None:
        """Have this certificate from the next start on, or from the next `pg_reload_conf()`."""
        self._write(self._data / "server.crt", certificate.file.read_text())
        self._write(self._data / "server.key", certificate.key.read_text())


@pytest.fixture(scope="package")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Trusted by both servers, and by their clients if they are told to."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="package")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Trusted by nobody."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="package")
def tls_postgres(authority: Authority) -> Iterator[PostgresServer]:
    if OLDEST not in installed():
        pytest.skip(f"PostgreSQL {OLDEST} is not installed; as root, `tests/support/packages test` installs it")
    with TlsPostgres(authority) as server:
        yield server


@pytest.fixture(scope="package")
def tls_port() -> int:
    return free_port()


@pytest.fixture(scope="package")
def tls_rabbitmq(authority: Authority, tls_port: int) -> Iterator[RabbitServer]:
    certificate = authority.issue(BROKER, "localhost")
    configuration = {
        "listeners.ssl.1": f"127.0.0.1:{tls_port}",
        "ssl_options.cacertfile": str(authority.file),
        "ssl_options.certfile": str(certificate.file),
        "ssl_options.keyfile": str(certificate.key),
        "ssl_options.verify": "verify_peer",
        "ssl_options.fail_if_no_peer_cert": "true",
        "auth_mechanisms.1": "PLAIN",
        "auth_mechanisms.2": "EXTERNAL",
        "ssl_cert_login_from": "common_name",
    }
    with RabbitServer(schedulers=1, configuration=configuration, plugins=["rabbitmq_auth_mechanism_ssl"]) as server:
        yield server


@pytest.fixture(scope="package")
def client(authority: Authority) -> Certificate:
    """A client's certificate, in the name of the broker's user."""
    return authority.issue(USER)


@pytest.fixture
def url(tls_rabbitmq: RabbitServer, tls_port: int, authority: Authority, client: Certificate) -> Iterator[URL]:
    """A fresh virtual host of the broker, entered through TLS."""
    vhost = f"tls_{secrets.token_hex(4)}"
    plain = URL(tls_rabbitmq.add_vhost(vhost))
    trusted = {"cafile": str(authority.file), "certfile": str(client.file), "keyfile": str(client.key)}
    yield plain.with_scheme("amqps").with_host(BROKER).with_port(tls_port).with_query(trusted)
    tls_rabbitmq.delete_vhost(vhost)


@pytest.fixture
def names() -> Iterator[Names]:
    with resolving() as names:
        names[BROKER] = names["other.test"] = ["127.0.0.1"]
        yield names


@pytest.fixture(scope="package")
def certified(authority: Authority) -> Certificate:
    return authority.issue(ROLE)


def as_certified(
    server: PostgresServer, authority: Authority, client: Certificate, database: str = "postgres", **more: object
) -> str:
    """Return a URL of the role that a certificate lets in, without a password."""
    with psycopg.connect(server.admin_url, autocommit=True) as connection:
        if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [ROLE]).rowcount:
            connection.execute(f"CREATE ROLE {ROLE} LOGIN SUPERUSER")
    parameters = {
        "hostaddr": "127.0.0.1",
        "sslmode": "verify-full",
        "sslrootcert": authority.file,
        "sslcert": client.file,
        "sslkey": client.key,
        **more,
    }
    return f"postgresql://{ROLE}@{DATABASE}:{server.port}/{database}?{urlencode(parameters)}"
