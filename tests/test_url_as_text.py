"""An application may give the URL of a server as text wherever settings are taken."""

from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.secret import SecretFile
from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, on
from relay.consume.pool import PartitionedConsumer
from relay.errors import ConfigurationError
from relay.publisher import DurablePublisher

DATABASE = "postgresql://writer:hush@127.0.0.1/shop"
BROKER = "amqp://consumer:pass@127.0.0.1/"


@on("Counted")
async def count(message: Message, connection: psycopg.AsyncConnection) -> None:
    """Apply nothing."""


def test_the_url_alone_stands_for_the_settings_of_a_server(tmp_path: Path) -> None:
    inbox = Inbox(DATABASE, "projection")
    consumer = Consumer("billing", [count], inbox=inbox, broker=BROKER)
    PartitionedConsumer("billing", [count], inbox=inbox, broker=BROKER)
    DurablePublisher(DATABASE, broker=BROKER, name="sensors")
    file = tmp_path / "url"
    file.write_text(DATABASE)

    assert inbox.database == DatabaseSettings(url=DATABASE) == DatabaseSettings(url=SecretStr(DATABASE))
    assert Inbox(SecretFile(file), "projection").database == inbox.database
    assert consumer.setup.broker == BrokerSettings(url=BROKER)


def test_text_that_is_no_url_of_the_server_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigurationError, match=r"DatabaseSettings\(url=...\): it takes a libpq URL") as refused:
        Inbox("mysql://u:hush@h/d", "projection")
    assert "hush" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"BrokerSettings\(url=...\): it takes amqp://"):
        Consumer("billing", [count], inbox=Inbox(DATABASE, "projection"), broker="http://h")
    with pytest.raises(ConfigurationError, match=r"BrokerSettings\(url=...\): it can be read in two ways"):
        Consumer("billing", [count], inbox=Inbox(DATABASE, "projection"), broker="amqp://u:a@b@h/v@w")
