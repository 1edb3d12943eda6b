"""What a console needs to tell of consumers: a relay that is alive, and queues that its settings list."""

from collections.abc import Iterator

import pytest

from relay.config.settings import Settings
from relay.config.topology import Queue, TopologySettings
from tests.operate.rows import Rows


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of a database whose relay is alive for an hour."""
    written = Rows(database_url)
    with written.connection:
        written.node(age=-3600, can_deliver=True)
        yield written


def with_queue(settings: Settings, *names: str) -> Settings:
    """Return the settings with these queues in their topology, and with no exchange that would be missing."""
    topology = TopologySettings(queues=tuple(Queue.model_validate({"name": name}) for name in names))
    broker = settings.broker.model_copy(update={"exchange": ""})
    return settings.model_copy(update={"topology": topology, "broker": broker})
