"""With amqps:// the broker is who the URL names, whichever address that is, and nothing is asked at a terminal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from yarl import URL

from relay.config.loading import load
from relay.config.settings import BrokerSettings
from relay.config.tls import TLS_PARAMETERS
from relay.errors import BrokerUnavailableError, ConfigurationError
from relay.servers.rabbitmq.connection import connect
from relay.servers.rabbitmq.hosts import broker_urls
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.certificates import Authority, Certificate
from tests.support.names import Names
from tests.support.proxy import FaultProxy
from tests.tls.conftest import BROKER

ADDRESSES = "127.0.0.2", "127.0.0.3"

DOCUMENTED = Path(__file__).parents[2] / "docs" / "tls.md"

CONNECT = """
import asyncio, sys
from relay.servers.rabbitmq.connection import connect
from relay.config.settings import BrokerSettings
asyncio.run(connect(BrokerSettings(url=sys.argv[1]), "test"))
"""


def settings(url: URL) -> BrokerSettings:
    return BrokerSettings(url=SecretStr(str(url)))


async def refusal(url: URL) -> str:
    """Return why the broker cannot be reached, without the host."""
    with pytest.raises(BrokerUnavailableError) as caught:
        await connect(settings(url), "test")
    host, words = re.fullmatch(r"(\S+ \(127\.0\.0\.1\)|\S+): (.*)", str(caught.value)).groups()  # type: ignore[union-attr]
    assert host.startswith(f"{url.host}:{url.port}")
    return str(words)


def is_turned_away(words: str, alert: str) -> bool:
    """Whether the broker ended the handshake. Its alert is lost if the reset behind it comes first."""
    return alert in words.lower() or "reset" in words.lower() or "closed" in words


async def test_each_address_is_let_in_by_the_certificate_of_the_name(url: URL, names: Names) -> None:
    port = free_port()
    names[BROKER] = list(ADDRESSES)
    named = settings(url.with_port(port))
    first, second = (FaultProxy("127.0.0.1", url.port or 0, amqp=False, at=(address, port)) for address in ADDRESSES)
    async with first, second:
        lost = await connect(named, "test")
        other = await connect(named, "test", after=lost)

        assert {lost.host.address, other.host.address} == set(ADDRESSES)
        assert (first.connections, second.connections) == (1, 1)
        for connection in (lost, other):
            await connection.close()


@pytest.mark.parametrize("host", ["other.test", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(url: URL, names: Names, host: str) -> None:
    words = await refusal(url.with_host(host))

    assert words.startswith("TLS: certificate verify failed: ")
    assert f"certificate is not valid for '{host}'" in words


async def test_a_certificate_of_another_authority_is_refused(url: URL, names: Names, stranger: Authority) -> None:
    for parameters in (url.update_query(cafile=str(stranger.file)), url.without_query_params("cafile")):
        assert (await refusal(parameters)).startswith("TLS: certificate verify failed: ")


@pytest.mark.parametrize("value", ["false", "no", "off", "true", ""])
def test_verification_is_turned_off_by_one_value_only(url: URL, value: str) -> None:
    with pytest.raises(ValidationError, match="no_verify_ssl takes 0, or 1 to verify nothing"):
        settings(url.update_query(no_verify_ssl=value))


@pytest.mark.parametrize(("value", "is_let_in"), [("0", False), ("1", True)])
async def test_what_is_not_verified_is_let_in(url: URL, names: Names, value: str, is_let_in: bool) -> None:
    unknown = url.without_query_params("cafile").update_query(no_verify_ssl=value)

    if is_let_in:
        await (await connect(settings(unknown), "test")).close()
    else:
        assert "certificate verify failed" in await refusal(unknown)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqps://u:hunter2@h/?cacertfile=/ca.crt", "the parameter cacertfile is not known; it takes cafile, "),
        ("amqps://u:hunter2@h/?verify=verify_peer", "the parameter verify is not known"),
        ("amqps://h/,amqps://u:hunter2@h/v?heartbeat=7", "the parameter heartbeat is not known"),
        ("amqp://u:hunter2@h/?cafile=/ca.crt", "the parameter cafile is for amqps://, and amqp:// does not encrypt"),
        ("amqps://u:hunter2@h/?cafile=/a&cafile=/b", "the parameter cafile is given twice"),
        ("amqps://u:hunter2@h/?keyfile=/k", "the parameter keyfile needs certfile"),
        ("amqps://u:hunter2@h/?cadata=MIIB+w==", "the parameter cadata takes a DER certificate in base64"),
        ("amqps://u:hunter2@h/?auth=amqplain", "the parameter auth takes plain or external"),
        ("amqps://user?hunter2=x@h/", "broker.url"),  # what stands behind the question mark is the password's rest
    ],
)
def test_a_parameter_without_the_effect_that_it_seems_to_have_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        load(environ={"RELAY_BROKER_URL": url})

    assert str(caught.value).startswith("broker.url (variable RELAY_BROKER_URL): ")
    assert "hunter2" not in str(caught.value)


def test_the_documented_parameters_are_those_that_are_taken() -> None:
    section = DOCUMENTED.read_text().partition("\n## RabbitMQ\n")[2].partition("\n## ")[0]

    assert set(re.findall(r"^- `(\w+)`: ", section, re.MULTILINE)) == {*TLS_PARAMETERS, "auth"}


async def test_a_client_without_the_certificate_that_is_demanded_is_refused(url: URL, names: Names) -> None:
    words = await refusal(url.without_query_params("certfile", "keyfile"))

    assert is_turned_away(words, "certificate required")


async def test_a_client_with_a_certificate_of_another_authority_is_refused(
    url: URL, names: Names, stranger: Authority
) -> None:
    file, key = stranger.issue("relay")

    words = await refusal(url.update_query(certfile=str(file), keyfile=str(key)))

    assert is_turned_away(words, "unknown ca")


async def test_a_certificate_takes_the_place_of_user_and_password(url: URL, names: Names) -> None:
    connection = await connect(settings(url.with_user(None).update_query(auth="external")), "test")

    await connection.close()


async def test_a_mechanism_that_the_broker_does_not_offer_is_named(rabbitmq: RabbitServer) -> None:
    words = await refusal(URL(rabbitmq.url()).with_query(auth="external"))

    assert words == "the broker offers the mechanisms AMQPLAIN PLAIN, and not the one of the parameter auth"


async def test_a_broker_without_tls_gets_no_password(rabbitmq: RabbitServer, authority: Authority) -> None:
    words = await refusal(URL(rabbitmq.url()).with_scheme("amqps").with_query(cafile=str(authority.file)))

    assert words == "TLS: [SSL: WRONG_VERSION_NUMBER] wrong version number"


@pytest.mark.parametrize("name", ["cafile", "certfile", "keyfile", "capath"])
async def test_a_file_that_is_missing_is_named(url: URL, names: Names, tmp_path: Path, name: str) -> None:
    missing = str(tmp_path / "missing")

    assert await refusal(url.update_query({name: missing})) == f"{name} {missing}: No such file or directory"


async def test_a_file_that_is_no_certificate_is_named(url: URL, names: Names, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("nothing")

    assert (await refusal(url.update_query(cafile=str(file)))).startswith(f"cafile {file}: ")
    assert (await refusal(url.update_query(certfile=str(file)))).startswith(f"certfile {file}, keyfile ")


async def test_a_key_of_another_certificate_is_named(url: URL, names: Names, authority: Authority) -> None:
    key = authority.issue("mismatched").key

    assert f"keyfile {key}: [X509: KEY_VALUES_MISMATCH]" in await refusal(url.update_query(keyfile=str(key)))


def test_nobody_is_asked_for_the_passphrase_of_a_key(url: URL, authority: Authority) -> None:
    locked = authority.issue("locked", passphrase="sesame")
    known = url.with_host("127.0.0.1").update_query(certfile=str(locked.file), keyfile=str(locked.key))

    # Without a terminal OpenSSL reads what it asks for from stdin.
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, str(known)],
        input="sesame\n",
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )

    assert f"keyfile {locked.key}: the key is encrypted, and no passphrase can be given: decrypt it" in done.stderr
    assert "pass phrase" not in done.stdout + done.stderr.replace("passphrase", "")


async def test_renewed_files_are_in_use_from_the_next_connection_on(
    url: URL, names: Names, tmp_path: Path, authority: Authority, client: Certificate, stranger: Authority
) -> None:
    trusted, certificate, key = (tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key"))
    trusted.write_text(stranger.file.read_text())
    certificate.write_text(client.file.read_text())
    key.write_text(client.key.read_text())
    kept = settings(url.with_query(cafile=str(trusted), certfile=str(certificate), keyfile=str(key)))
    with pytest.raises(BrokerUnavailableError, match="certificate verify failed"):
        await connect(kept, "test")

    trusted.write_text(stranger.file.read_text() + authority.file.read_text())
    connection = await connect(kept, "test")

    await connection.close()
    assert [each.host for each in broker_urls(kept)] == [BROKER]
