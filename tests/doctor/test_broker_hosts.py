"""Each host of the list is asked by itself, with the fault there and without it."""

import asyncio
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aio_pika.abc import AbstractChannel
from yarl import URL

from relay.config.settings import Settings
from relay.config.topology import Queue, QueueType, TopologySettings
from relay.operate.doctor.finding import Verdict
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.doctor.broker_findings import at, changed, findings_of, look, verdict
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

MAX_MESSAGE_SIZE = 1_000_000  # of the other broker
NOBODY = "127.0.0.1:1"


class Other(RabbitServer):
    """A broker that is not of the cluster, with TLS; its alarms and its words are ours."""

    def __init__(self, certificates: Path) -> None:
        self.tls_port = free_port()
        super().__init__(
            schedulers=1,
            configuration={
                "cluster_name": "another",
                "max_message_size": str(MAX_MESSAGE_SIZE),
                "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
                "ssl_options.certfile": str(certificates / "certificate.pem"),
                "ssl_options.keyfile": str(certificates / "key.pem"),
            },
        )

    def says(self, properties: str) -> None:
        """Let it say other things about itself to who connects; Erlang terms."""
        self.call(f"application:set_env(rabbit, server_properties, [{properties}]).")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 10 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        [*command.split(), "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def other(certificates: Path) -> Iterator[Other]:
    with Other(certificates) as node:
        yield node


@pytest.fixture
def elsewhere(settings: Settings, other: Other) -> Iterator[Settings]:
    """Settings of a relay on the other broker."""
    name = f"test_{secrets.token_hex(6)}"
    yield at(settings, other.add_vhost(name))
    other.says("")
    other.delete_vhost(name)


@pytest.fixture
async def alarm(other: Other) -> AsyncIterator[None]:
    other.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    yield
    other.ctl("set_vm_memory_high_watermark", "0.4")


def url_of(settings: Settings) -> str:
    return settings.broker.url.get_secret_value()


@asynccontextmanager
async def between(url: URL, *, downwards: dict[bytes, bytes], upwards: dict[bytes, bytes]) -> AsyncIterator[URL]:
    """Stand between us and a broker, and put other words of the same length into what they say."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(url.host, url.port)
        await asyncio.gather(pipe(reader, to_broker, upwards), pipe(from_broker, writer, downwards))

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as server:
        yield url.with_port(server.sockets[0].getsockname()[1])


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, instead: dict[bytes, bytes]) -> None:
    with suppress(asyncio.IncompleteReadError):  # the end
        while True:
            head = await reader.readexactly(7)
            greets = head.startswith(b"AMQP")
            frame = head + await reader.readexactly(1 if greets else int.from_bytes(head[3:]) + 1)
            writer.write(replaced(frame, instead))
    writer.close()


def replaced(frame: bytes, instead: dict[bytes, bytes]) -> bytes:
    for said, other in instead.items():
        frame = frame.replace(said, other)
    return frame


async def test_a_host_that_lets_us_in_is_told_with_its_time(settings: Settings) -> None:
    (finding,) = await findings_of(settings, "host")

    assert finding.verdict is Verdict.OK
    assert "lets relay into virtual host test_" in finding.words
    assert finding.words.endswith(" ms")


@pytest.mark.parametrize(
    ("wrong", "words", "remedy"),
    [
        ({"port": 1}, "Connect call failed", "that the broker runs"),
        ({"password": "wrong"}, "ACCESS_REFUSED - Login was refused", "rabbitmqctl authenticate_user relay"),
        ({"path": "/nowhere"}, "530 NOT_ALLOWED - vhost nowhere not found", "rabbitmqctl add_vhost nowhere"),
    ],
    ids=["port", "password", "vhost"],
)
async def test_a_host_that_does_not_is_told_in_the_broker_s_words(
    settings: Settings, wrong: dict[str, str | int], words: str, remedy: str
) -> None:
    url = URL(url_of(settings))
    for part, value in wrong.items():
        url = getattr(url, f"with_{part}")(value)

    (alone,) = await findings_of(at(settings, str(url)), "host")
    good, bad = await findings_of(at(settings, str(url), url_of(settings)), "host")

    assert alone.verdict is Verdict.FAILED
    assert words in alone.words
    assert remedy in alone.remedy
    assert (good.verdict, bad.verdict) == (Verdict.OK, Verdict.WARNING)
    assert bad.words == alone.words


async def test_without_a_host_every_other_check_is_skipped(settings: Settings) -> None:
    assert await verdict(at(settings, f"amqp://a:b@{NOBODY}/"), "alarm") is Verdict.SKIPPED


async def test_a_user_without_a_right_to_the_virtual_host_is_told_the_remedy(
    settings: Settings, rabbitmq: RabbitServer
) -> None:
    rabbitmq.call('rabbit_vhost:add(<<"closed">>, <<"tests">>).')

    (finding,) = await findings_of(at(settings, rabbitmq.url("closed")), "host")

    rabbitmq.delete_vhost("closed")
    assert "530 NOT_ALLOWED - access to vhost 'closed' refused for user 'relay'" in finding.words
    assert "rabbitmqctl set_permissions -p closed relay" in finding.remedy


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.9.29", Verdict.WARNING),
        ("3.10.8", Verdict.OK),
        ("4.1.0", Verdict.OK),
        ("4.4.0", Verdict.OK),
        ("newest", Verdict.WARNING),
    ],
)
async def test_the_version_is_told_and_an_old_one_warned_of(
    elsewhere: Settings, other: Other, version: str, expected: Verdict
) -> None:
    other.says(f'{{<<"version">>, longstr, <<"{version}">>}}')

    (finding,) = await findings_of(elsewhere, "version")

    assert finding.verdict is expected
    assert f"is RabbitMQ {version}" in finding.words
    assert ("20 deliveries" in finding.words) is version.startswith("4")
    assert ("newer than 4.3" in finding.words) is (version == "4.4.0")
    assert ("transient queues" in finding.words and "global QoS" in finding.words) is (version == "4.4.0")
    assert ("cluster_partition_handling has no effect" in finding.words) is (version == "4.4.0")


@pytest.mark.parametrize(
    ("queue", "expected"),
    [(Queue(name="mine"), Verdict.WARNING), (Queue(name="mine", dead_letter_exchange=""), Verdict.OK)],
)
async def test_a_message_that_rabbitmq_4_would_drop_is_warned_of(
    elsewhere: Settings, other: Other, queue: Queue, expected: Verdict
) -> None:
    other.says('{<<"version">>, longstr, <<"4.1.0">>}')

    listed = elsewhere.model_copy(update={"topology": TopologySettings(queues=(queue,))})

    assert await verdict(listed, "delivery_limit") is expected


OLD = {"x-queue-version": 1, "x-queue-master-locator": "min-masters"}


@pytest.mark.parametrize(
    ("version", "verdicts"),
    [
        ("3.10.8", []),
        ("4.1.0", [Verdict.WARNING, Verdict.WARNING, Verdict.WARNING]),
        ("4.3.6", [Verdict.WARNING, Verdict.FAILED, Verdict.FAILED]),
    ],
)
async def test_queues_that_a_newer_broker_refuses_are_named(
    elsewhere: Settings, other: Other, version: str, verdicts: list[Verdict]
) -> None:
    other.says(f'{{<<"version">>, longstr, <<"{version}">>}}')
    queues = (
        Queue(name="transient", type=QueueType.CLASSIC, durable=False),
        Queue(name="old", type=QueueType.CLASSIC, arguments=OLD),
        Queue(name="new", type=QueueType.CLASSIC, arguments={"x-queue-version": 2}),
    )
    listed = elsewhere.model_copy(update={"topology": TopologySettings(queues=queues)})

    findings = await findings_of(listed, "deprecated")

    assert [each.verdict for each in findings] == verdicts
    for finding, named in zip(findings, ("neither durable nor exclusive", *OLD), strict=False):
        assert named in finding.words


async def test_another_product_is_warned_of(elsewhere: Settings, other: Other) -> None:
    other.says('{<<"product">>, longstr, <<"Another">>}')

    assert await verdict(elsewhere, "version") is Verdict.WARNING


async def test_a_capability_that_is_missing_fails(settings: Settings) -> None:
    assert await verdict(settings, "capabilities") is Verdict.OK

    async with between(URL(url_of(settings)), downwards={b"basic.nack": b"basic.none"}, upwards={}) as url:
        (finding,) = await findings_of(at(settings, str(url)), "capabilities")

    assert finding.verdict is Verdict.FAILED
    assert finding.words.endswith("has no basic.nack")


async def test_hosts_of_two_clusters_fail(settings: Settings, elsewhere: Settings) -> None:
    url = url_of(settings)
    assert await verdict(at(settings, url, url), "cluster") is Verdict.OK

    (finding,) = await findings_of(at(settings, url, url_of(elsewhere)), "cluster")

    assert finding.verdict is Verdict.FAILED
    assert f"127.0.0.1:{URL(url_of(elsewhere)).port} of cluster another" in finding.words


async def test_two_virtual_hosts_of_one_cluster_fail(settings: Settings, rabbitmq: RabbitServer) -> None:
    (finding,) = await findings_of(at(settings, url_of(settings), rabbitmq.url()), "cluster")

    assert finding.verdict is Verdict.FAILED
    assert finding.words.endswith("virtual host /")


async def test_the_net_ticktime_is_not_told_but_how_to_ask(settings: Settings, rabbitmq: RabbitServer) -> None:
    (finding,) = await findings_of(settings, "net_ticktime")

    command = finding.words.partition("rabbitmqctl eval '")[2].partition("'")[0]
    assert finding.verdict is Verdict.SKIPPED
    assert rabbitmq.ctl("eval", command).strip() == "60"


async def test_a_broker_without_an_alarm_takes_messages(elsewhere: Settings) -> None:
    assert await verdict(elsewhere, "alarm") is Verdict.OK


async def test_an_alarm_is_told_and_who_is_blocked_is_asked_no_more(
    elsewhere: Settings, other: Other, alarm: None
) -> None:
    found = await look(elsewhere)

    (finding,) = found["alarm"]
    assert finding.verdict is Verdict.FAILED
    assert finding.words.endswith("blocks publishers: low on memory")
    verdicts = [found[name][0].verdict for name in ("exchange", "write", "message_size")]
    assert verdicts == [Verdict.OK, Verdict.SKIPPED, Verdict.SKIPPED]
    await eventually(lambda: other.call("length(rabbit_networking:connections()).") == "0", "nothing is left behind")


async def test_a_broker_that_would_not_refuse_is_asked_nothing_by_messages(
    settings: Settings, channel: AbstractChannel
) -> None:
    queue = await declare_bound(channel, "mine")
    lasting = {b"\x0doutbox-doctor": b"\x0d0000000060000"}  # an expiration that it takes

    async with between(URL(url_of(settings)), downwards={}, upwards=lasting) as url:
        found = await look(at(settings, str(url)))

    verdicts = [found[name][0].verdict for name in ("alarm", "write", "message_size")]
    assert verdicts == [Verdict.OK, Verdict.SKIPPED, Verdict.SKIPPED]
    assert (await queue.declare()).message_count == 0


async def test_a_message_larger_than_the_broker_takes_is_warned_of(elsewhere: Settings) -> None:
    fitting = changed(elsewhere, "relay", max_message_bytes=MAX_MESSAGE_SIZE)
    assert await verdict(fitting, "message_size") is Verdict.OK

    (finding,) = await findings_of(changed(elsewhere, "relay", max_message_bytes=MAX_MESSAGE_SIZE + 1), "message_size")

    assert finding.verdict is Verdict.WARNING
    assert f"larger than configured max size {MAX_MESSAGE_SIZE}" in finding.words


@pytest.mark.parametrize(("version", "most"), [("3.10.8", "128 MiB"), ("4.3.6", "16 MiB")])
async def test_a_very_large_message_is_not_tried(elsewhere: Settings, other: Other, version: str, most: str) -> None:
    other.says(f'{{<<"version">>, longstr, <<"{version}">>}}')

    (finding,) = await findings_of(changed(elsewhere, "relay", max_message_bytes=10**9), "message_size")

    assert finding.verdict is Verdict.SKIPPED
    assert f"takes {most} by default" in finding.words


async def test_a_certificate_is_told_with_its_days(elsewhere: Settings, other: Other, certificates: Path) -> None:
    plain = URL(url_of(elsewhere))
    encrypted = plain.with_scheme("amqps").with_host("localhost").with_port(other.tls_port)
    verified = encrypted.with_query(cafile=str(certificates / "certificate.pem"))

    (short_lived,) = await findings_of(at(elsewhere, str(verified)), "tls")
    (unverified,) = await findings_of(at(elsewhere, str(encrypted.with_query(no_verify_ssl="1"))), "tls")
    refused = await findings_of(at(elsewhere, str(encrypted)), "host")  # at each address of localhost

    assert "the certificate is valid for 10 days more" in short_lived.words
    assert (short_lived.verdict, unverified.verdict) == (Verdict.WARNING, Verdict.WARNING)
    assert unverified.words.endswith("the certificate is not verified")
    assert {each.verdict for each in refused} == {Verdict.FAILED}
    assert any("certificate verify failed" in each.words for each in refused)
    assert any(f"`openssl s_client -connect localhost:{other.tls_port} -showcerts`" in each.remedy for each in refused)
    assert await findings_of(elsewhere, "tls") == []
