"""Each host of `broker.url`, asked one by one: does it let us in, what is it, and does it take messages?"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, assert_never
from uuid import uuid4

from aiormq.exceptions import ConnectionClosed, ProbableAuthenticationError
from yarl import URL

from relay.config.settings import Settings
from relay.config.tls import TlsFileError
from relay.errors import BrokerUnavailableError
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.question import BrokerAnswer, Question, Reply, ask, publish_refused
from relay.runtime.memory import MIB
from relay.servers.rabbitmq.connection import Connection, connect_to
from relay.servers.rabbitmq.hosts import broker_urls, in_turn, place, vhost

HOST = "broker.host"
OLDEST_BROKER, NEWEST_BROKER = (3, 10), (4, 3)  # the releases that the tests run on (docs/versions.md)
DEPRECATES, REFUSES_DEPRECATED = (4, 0), (4, 3)  # transient queues, arguments of old classic queues
REFUSING_MAJORS = (3, 4)  # of these it is known that what `publish_refused` asks for is never routed
CAPABILITIES = ("publisher_confirms", "basic.nack", "connection.blocked", "consumer_cancel_notify")
NOT_ALLOWED = 530  # AMQP's code for a virtual host that is missing or closed to the user
LARGEST_TRIED = 64 * MIB  # a message of more would be a burden on the broker
NOT_TRIED = Reply(BrokerAnswer.NONE, "not tried")
CERTIFICATE_DAYS = 30


@dataclass(slots=True)
class OpenHost:
    """A host that lets us in."""

    connection: Connection
    within: float  # seconds for each answer
    trial: Reply = NOT_TRIED  # to a message that it is to refuse, and that has no address

    @property
    def place(self) -> str:
        return str(self.connection.host)

    async def ask(self, question: Question, within: float | None = None) -> Reply:
        return await ask(self.connection, question, within or self.within)

    @property
    def properties(self) -> dict[str, Any]:
        """What it says about itself."""
        assert self.connection.transport is not None, "it is connected"  # noqa: S101
        return dict(self.connection.transport.connection.server_properties)

    @property
    def version(self) -> tuple[int, ...]:
        """`(3, 10)`; empty when it is no RabbitMQ."""
        numbers = str(self.properties.get("version", "")).split(".")[:2]
        known = self.properties.get("product") == "RabbitMQ" and all(number.isdecimal() for number in numbers)
        return tuple(map(int, numbers)) if known else ()


async def connect_each(settings: Settings, hosts: list[OpenHost]) -> AsyncIterator[Finding]:
    """Connect to each host of the list, and append those that let us in; who calls closes them."""
    within = settings.broker.connect_timeout
    refused = []
    async for host in in_turn(broker_urls(settings.broker), after=None, within=within):
        if isinstance(host, BrokerUnavailableError):
            refused.append((str(host), "check the name in broker.url"))
            continue
        begun = time.monotonic()
        try:
            connection = await connect_to(host, settings.broker, "outbox-relay doctor")
        except BrokerUnavailableError as error:
            refused.append((str(error), _remedy(host.url, error.__cause__)))
        else:
            milliseconds = 1000 * (time.monotonic() - begun)
            hosts.append(OpenHost(connection, within))
            words = f"{host} lets {host.url.user} into virtual host {vhost(host.url)} within {milliseconds:.0f} ms"
            yield Finding(HOST, Verdict.OK, words)
    for words, remedy in refused:
        # The relay goes to the next host, and has one fewer to go to.
        yield Finding(HOST, Verdict.WARNING if hosts else Verdict.FAILED, words, remedy)


async def close_each(hosts: Iterable[OpenHost]) -> None:
    for host in hosts:
        await host.connection.hang_up()


def certificates(hosts: Iterable[OpenHost]) -> Iterator[Finding]:
    """Look at the TLS of each host that is reached by it."""
    check = "broker.tls"
    for host in hosts:
        if (tls := host.connection.tls) is None:
            continue
        certificate: Any = tls.getpeercert()
        words = f"{host.place}: {tls.version()}"
        if not certificate:
            remedy = "take no_verify_ssl out of broker.url, and name the authority in cafile=PATH"
            yield Finding(check, Verdict.WARNING, f"{words}, and the certificate is not verified", remedy)
            continue
        days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400
        words = f"{words}, the certificate is valid for {days:.0f} days more"
        if days >= CERTIFICATE_DAYS:
            yield Finding(check, Verdict.OK, words)
        else:
            yield Finding(check, Verdict.WARNING, words, "renew it: without a valid one nothing connects any more")


def versions(hosts: Iterable[OpenHost]) -> Iterator[Finding]:
    """Yield what each host runs."""
    check = "broker.version"
    for host in hosts:
        properties, version = host.properties, host.version
        words = f"{host.place} is {properties.get('product')} {properties.get('version')}"
        if not version:
            yield Finding(check, Verdict.WARNING, words, "the relay is tested with RabbitMQ 3.10 and later")
        elif version < OLDEST_BROKER:
            yield Finding(check, Verdict.WARNING, words, "the relay is tested with 3.10 and later: upgrade it")
        else:
            notes = []
            if version > NEWEST_BROKER:
                notes.append(f"newer than {'.'.join(map(str, NEWEST_BROKER))}, the newest that the tests run on")
            if version >= (4,):
                notes.append("a quorum queue gives a message up after 20 deliveries, unless told otherwise")
                notes.append("none is over 16 MiB, likewise")
            if version >= REFUSES_DEPRECATED:
                notes.append("by default it refuses transient queues that are not exclusive")
                notes.append("it takes a global QoS as that of each consumer")
                notes.append("cluster_partition_handling has no effect")
            yield Finding(check, Verdict.OK, f"{words}: {'; '.join(notes)}" if notes else words)


def clusters(hosts: list[OpenHost]) -> Iterator[Finding]:
    """See that all hosts lead to one virtual host of one cluster."""
    check = "broker.cluster"
    homes = [(str(host.properties.get("cluster_name", "without a name")), vhost(host.connection.url)) for host in hosts]
    if len(set(homes)) == 1:
        name, home = homes[0]
        yield Finding(check, Verdict.OK, f"every host is of cluster {name}, virtual host {home}")
        return
    places = ", ".join(
        f"{host.place} of cluster {name}, virtual host {vhost}"
        for host, (name, vhost) in zip(hosts, homes, strict=True)
    )
    remedy = (
        "list the nodes of one cluster with one virtual host in broker.url: after a failover the messages would go"
        " elsewhere (`rabbitmqctl cluster_status` names the nodes)"
    )
    yield Finding(check, Verdict.FAILED, f"the hosts do not lead to one place: {places}", remedy)


def capabilities(hosts: Iterable[OpenHost]) -> Iterator[Finding]:
    """See that each host has the extensions to AMQP that the relay and its consumers live by."""
    check = "broker.capabilities"
    for host in hosts:
        has = host.properties.get("capabilities") or {}
        missing = [name for name in CAPABILITIES if not has.get(name)]
        if missing:
            words = f"{host.place} has no {', '.join(missing)}"
            yield Finding(check, Verdict.FAILED, words, "use RabbitMQ: without these nobody knows what was stored")
        else:
            yield Finding(check, Verdict.OK, f"{host.place} has {', '.join(CAPABILITIES)}")


def net_ticktime(_: Iterable[OpenHost]) -> Iterator[Finding]:
    words = (
        "AMQP does not tell it: ask with `rabbitmqctl eval 'net_kernel:get_net_ticktime().'`;"
        " 10 is right, with the default of 60 a silent node stops its queues for 70 s"
    )
    yield Finding("broker.net_ticktime", Verdict.SKIPPED, words)


async def alarms(hosts: Iterable[OpenHost]) -> AsyncIterator[Finding]:
    """See that each host takes messages: it says that it does not only to who publishes.

    What is published has no address, and is refused besides.
    """
    check = "broker.alarm"
    for host in hosts:
        begun = time.monotonic()
        host.trial = reply = await _unless_blocked(host)
        if host.connection.blocked is not None:
            reason = host.connection.blocked
            remedy = f"give it more {reason}: `rabbitmq-diagnostics alarms` tells where; nothing goes out meanwhile"
            yield Finding(check, Verdict.FAILED, f"{host.place} blocks publishers: low on {reason}", remedy)
        elif reply.answer is BrokerAnswer.NONE:
            remedy = "look at the broker's log: who publishes waits"
            yield Finding(check, Verdict.FAILED, f"{host.place}: {reply.words}", remedy)
        else:
            milliseconds = 1000 * (time.monotonic() - begun)
            yield Finding(check, Verdict.OK, f"{host.place} has no alarm, and answers within {milliseconds:.0f} ms")


async def message_size(hosts: Iterable[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that each host takes a message as large as the relay may send."""
    check, size = "broker.message_size", settings.relay.max_message_bytes
    for host in hosts:
        words = f"{host.place}: relay.max_message_bytes is {size}"
        if (why := why_not_publish(host)) or size > LARGEST_TRIED:
            default = "16 MiB" if host.version >= (4,) else "128 MiB"
            why = why or f"more than {LARGEST_TRIED // MIB} MiB is not tried; RabbitMQ takes {default} by default"
            yield Finding(check, Verdict.SKIPPED, f"{words}: {why}")
            continue
        nowhere = _nowhere()
        empty = await host.ask(publish_refused("", nowhere))
        # By the time that a confirm has: it is as large as a message can be.
        large = await host.ask(publish_refused("", nowhere, size), settings.broker.confirm_timeout)
        if large.answer is BrokerAnswer.NONE:
            yield Finding(check, Verdict.SKIPPED, f"{words}: {large.words}")
        elif large == empty:
            yield Finding(check, Verdict.OK, f"{words}, and the broker takes as much")
        else:
            remedy = "lower relay.max_message_bytes, or raise max_message_size in rabbitmq.conf"
            yield Finding(check, Verdict.WARNING, f"{words}: {large.words}", remedy)


def why_not_publish(host: OpenHost) -> str | None:
    """Return why a host cannot be asked by a message that it refuses; None when it can."""
    if host.connection.blocked is not None:
        return "the broker blocks publishers"
    if host.connection.is_lost:
        return "the connection was lost"
    match host.trial.answer:
        case BrokerAnswer.REFUSED:
            return None
        case BrokerAnswer.FORBIDDEN:  # as the user may not publish to the default exchange
            known = bool(host.version) and host.version[0] in REFUSING_MAJORS
            return None if known else "it is not known to refuse the message that would be tried"
        case BrokerAnswer.YES | BrokerAnswer.RETURNED | BrokerAnswer.MISSING:
            return "it does not refuse the message that would be tried"
        case BrokerAnswer.NONE:
            return host.trial.words
        case _:
            assert_never(host.trial.answer)


async def _unless_blocked(host: OpenHost) -> Reply:
    question = publish_refused("", _nowhere())
    asking = asyncio.create_task(host.ask(question), name="alarm")
    try:
        while not asking.done() and host.connection.blocked is None:
            await asyncio.wait([asking], timeout=0.05)
    finally:
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])
    return Reply(BrokerAnswer.NONE, "blocked") if asking.cancelled() else asking.result()


def _nowhere() -> str:
    return f"outbox-doctor.{uuid4()}"


def _remedy(url: URL, cause: BaseException | None) -> str:
    if isinstance(cause, ProbableAuthenticationError):
        return f"check user and password in broker.url; `rabbitmqctl authenticate_user {url.user}` tries them"
    if isinstance(cause, ConnectionClosed) and cause.args[0] == NOT_ALLOWED:
        name = vhost(url)
        return (
            f"check the virtual host in broker.url; `rabbitmqctl add_vhost {name}` makes it, and"
            f" `rabbitmqctl set_permissions -p {name} {url.user} CONFIGURE WRITE READ` lets the user in"
        )
    if isinstance(cause, TlsFileError):
        return "name a file that the relay's user can read, or renew it; it is read again at each connection"
    if isinstance(cause, ssl.SSLError):
        return (
            "check the name in broker.url, cafile, certfile and keyfile;"
            f" `openssl s_client -connect {place(url)} -showcerts` shows the broker's certificate"
        )
    remedy = "check host and port in broker.url, and that the broker runs: `rabbitmq-diagnostics listeners`"
    if url.scheme == "amqps" and "certfile" not in url.query:
        remedy += "; one that demands a certificate of its clients needs certfile and keyfile"
    return remedy
