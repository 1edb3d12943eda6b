"""Servers that let nobody in without TLS and a certificate: a row and an event go all the way."""

import asyncio
import json
import secrets
import signal
from pathlib import Path

import psycopg
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, on
from relay.outbox import Event, add
from relay.publisher import DurablePublisher
from relay.servers.rabbitmq.connection import connect
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import Command
from tests.support.certificates import Authority, Certificate
from tests.support.eventually import eventually
from tests.support.queues import declare_bound
from tests.support.template import template_of
from tests.tls.conftest import ROLE, TlsPostgres, as_certified

ENCRYPTED = "SELECT bool_and(ssl), count(*) > 1 FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = %s"


async def test_relay_consumer_and_publisher_are_let_in_by_their_certificates(
    tls_postgres: TlsPostgres,
    tls_rabbitmq: RabbitServer,
    authority: Authority,
    certified: Certificate,
    url: URL,
    tmp_path: Path,
) -> None:
    name = f"tls_{secrets.token_hex(4)}"
    admin_url = tls_postgres.create_database(name, template=template_of(tls_postgres))
    database = DatabaseSettings(url=SecretStr(as_certified(tls_postgres, authority, certified, name)))
    by_certificate = url.with_host("localhost").with_user(None).update_query(auth="external")
    broker = BrokerSettings(url=SecretStr(str(by_certificate)))
    relay = Command(tmp_path, RELAY_DATABASE_URL=database.url.get_secret_value(), RELAY_BROKER_URL=str(by_certificate))
    applied: set[str] = set()

    @on("*")
    async def apply(message: Message[bytes], _: psycopg.AsyncConnection) -> None:
        applied.add(message.type)

    connection = await connect(broker, "test")
    await declare_bound(await connection.channel(), "applied")
    consumer = Consumer("applied", [apply], inbox=Inbox(database, "tls"), broker=broker)
    consuming = asyncio.create_task(consumer.run(signals=False))
    with relay.start("run") as running:
        try:
            with psycopg.connect(database.url.get_secret_value()) as writer:
                add(writer, Event("customer", "1", "Written", {}))
            async with DurablePublisher(database, broker=broker, name="tls") as publisher:
                await publisher.publish(Event("customer", "1", "Published", {}))
            await eventually(lambda: applied == {"Written", "Published"}, "both are applied")

            status = await asyncio.to_thread(relay.process, "status", "--output", "json")
            with psycopg.connect(admin_url) as admin:
                encrypted = admin.execute(ENCRYPTED, [ROLE]).fetchone()
            connections = tls_rabbitmq.ctl("list_connections", "ssl", "auth_mechanism").split("\n")
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
            running.send_signal(signal.SIGTERM)
            output, log = await asyncio.to_thread(running.communicate, None, 60)
            await connection.close()

    assert (status.code, json.loads(status.out)["state"]) == (0, "ok"), status
    assert encrypted == (True, True)
    assert {line for line in connections if line and not line.startswith("ssl")} == {"true\tEXTERNAL"}
    assert running.returncode == 0, output + log
