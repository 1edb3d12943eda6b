"""The C client is a fair reference only while it sends what the relay sends."""

import asyncio
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from pamqp import decode

from bench.frame import backlog as table
from bench.frame import queue, reference
from bench.frame.backlog import Backlog, Keys
from bench.frame.relay import BenchRelay
from bench.frame.servers import Servers
from bench.frame.watch import wait_drained, watching

pytestmark = pytest.mark.skipif(
    not reference.is_buildable(),
    reason="no C compiler or no librabbitmq; as root, `tests/support/packages bench` installs them",
)

Message = dict[str, Any]


@pytest.fixture
def backlog(database_url: str, tmp_path: Path) -> Backlog:
    return table.prepare(database_url, tmp_path, Keys.HOT, rows=1)


@pytest.fixture
def header_kinds(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Note the AMQP type of each header as it is decoded: the library makes plain integers of all integer types."""
    kinds: list[bytes] = []
    decode_value = decode.embedded_value

    def noting(value: bytes) -> tuple[int, Any]:
        kinds.append(value[:1])
        return decode_value(value)

    monkeypatch.setattr(decode, "embedded_value", noting)
    return kinds


def test_the_c_client_sends_the_same_message_as_the_relay(
    servers: Servers, backlog: Backlog, tmp_path: Path, header_kinds: list[bytes]
) -> None:
    reference.publish(reference.build(tmp_path), servers.broker_url, backlog)
    of_the_client = asyncio.run(_take(servers.broker_url, header_kinds))
    _relay_all(servers, backlog)
    of_the_relay = asyncio.run(_take(servers.broker_url, header_kinds))

    assert of_the_client == of_the_relay
    assert of_the_relay["body_bytes"] == table.PAYLOAD_BYTES


def test_the_c_client_fails_when_a_message_is_returned(broker_url: str, backlog: Backlog, tmp_path: Path) -> None:
    queue.bind_queue(broker_url, "another.routing.key")

    with pytest.raises(reference.ReferenceClientError, match="no queue is bound"):
        reference.publish(reference.build(tmp_path), broker_url, backlog)


def _relay_all(servers: Servers, backlog: Backlog) -> None:
    table.empty(servers.database_url, same_ids=True)
    with (
        watching(servers.database_url) as watch,
        BenchRelay(*servers.urls, servers.folder).running() as relay,
        table.uncommitted(servers.database_url, backlog) as writer,
    ):
        writer.commit()
        wait_drained(watch, relay)


async def _take(broker_url: str, header_kinds: list[bytes]) -> Message:
    """Take one message out of the queue and give all of it that should not differ."""
    async with await aio_pika.connect(broker_url) as connection, connection.channel() as channel:
        taken = await channel.declare_queue(queue.QUEUE, passive=True)
        header_kinds.clear()
        message = await taken.get(no_ack=True)
        assert message is not None
        kinds = header_kinds[: len(message.headers)]
    return {
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "content_type": message.content_type,
        "delivery_mode": message.delivery_mode,
        "message_id": message.message_id,
        "has_timestamp": message.timestamp is not None,
        "type": message.type,
        "app_id": message.app_id,
        "headers": list(zip(message.headers.items(), kinds, strict=True)),
        "body_bytes": message.body_size,
    }
