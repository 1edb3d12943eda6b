"""With amqps:// the certificate must be for the name in the URL, whichever address it leads to."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from yarl import URL

from relay.broker import connect
from relay.errors import BrokerUnavailableError
from relay.settings import BrokerSettings
from tests.support.names import Names, resolving
from tests.support.process import free_port, run
from tests.support.proxy import FaultProxy
from tests.support.rabbitmq import RabbitServer

NAME = "rabbit.test"
ADDRESSES = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed one for the name, and for no address; its key beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    file = folder / "rabbit.crt"
    made_for = f"-subj /CN={NAME} -addext subjectAltName=DNS:{NAME}".split()
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    run(["openssl", "req", *kind, *made_for, "-keyout", file.with_suffix(".key"), "-out", file])
    return file


@pytest.fixture(scope="module")
def url(certificate: Path) -> Iterator[URL]:
    """A broker with TLS on a port of its own."""
    port = free_port()
    configuration = {
        "listeners.ssl.1": f"127.0.0.1:{port}",
        "ssl_options.cacertfile": str(certificate),
        "ssl_options.certfile": str(certificate),
        "ssl_options.keyfile": str(certificate.with_suffix(".key")),
        "ssl_options.verify": "verify_none",
    }
    with RabbitServer(schedulers=1, configuration=configuration) as server:
        plain = URL(server.add_vhost(f"tls_{secrets.token_hex(4)}"))
        yield plain.with_scheme("amqps").with_port(port).with_query(cafile=str(certificate))


@pytest.fixture
def names() -> Iterator[Names]:
    with resolving() as names:
        names[NAME] = names["other.test"] = ["127.0.0.1"]
        yield names


def settings(url: URL) -> BrokerSettings:
    return BrokerSettings(url=SecretStr(str(url)))


async def test_each_address_is_let_in_by_the_certificate_of_the_name(url: URL, names: Names) -> None:
    port = free_port()
    names[NAME] = list(ADDRESSES)
    upstream = str(url.host), url.port or 0
    named = settings(url.with_host(NAME).with_port(port))
    first, second = (FaultProxy(*upstream, amqp=False, at=(address, port)) for address in ADDRESSES)
    async with first, second:
        lost = await connect(named, "test")
        other = await connect(named, "test", after=lost)

        assert {lost.host.address, other.host.address} == set(ADDRESSES)
        assert (first.connections, second.connections) == (1, 1)
        for connection in (lost, other):
            await connection.close()


@pytest.mark.parametrize("host", ["other.test", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(url: URL, names: Names, host: str) -> None:
    with pytest.raises(BrokerUnavailableError, match=f"{host}.*certificate is not valid for '{host}'"):
        await connect(settings(url.with_host(host)), "test")


async def test_a_certificate_of_nobody_that_is_trusted_is_refused(url: URL, names: Names) -> None:
    with pytest.raises(BrokerUnavailableError, match=rf"{NAME}:\d+ \(127\.0\.0\.1\): .*self.signed"):
        await connect(settings(url.with_host(NAME).with_query(None)), "test")
