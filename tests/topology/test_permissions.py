"""Which permissions of RabbitMQ declaring takes, as docs/topology.md names them, and what is said without them."""

from collections.abc import Callable, Iterator

import pytest
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import BrokerSettings
from relay.config.topology import Binding, Exchange, Queue, TopologySettings
from relay.servers.rabbitmq.topology import Standing, apply
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.definitions import definitions

AsUser = Callable[..., BrokerSettings]


@pytest.fixture
def as_user(rabbitmq: RabbitServer, broker: BrokerSettings, broker_url: str) -> Iterator[AsUser]:
    """`as_user(configure, write, read)` gives the settings of a user with these permissions."""
    vhost = broker_url.rpartition("/")[2]

    def settings(*permissions: str) -> BrokerSettings:
        patterns = ", ".join(f'<<"{pattern}">>' for pattern in permissions)
        rabbitmq.call(
            f'rabbit_auth_backend_internal:set_permissions(<<"{vhost}">>, <<"{vhost}">>, {patterns}, <<"tests">>).'
        )
        url = URL(broker_url).with_user(vhost).with_password("pw")
        return broker.model_copy(update={"url": SecretStr(str(url))})

    rabbitmq.call(f'rabbit_auth_backend_internal:add_user(<<"{vhost}">>, <<"pw">>, <<"tests">>).')
    yield settings
    rabbitmq.call(f'rabbit_auth_backend_internal:delete_user(<<"{vhost}">>, <<"tests">>).')


async def test_who_may_configure_nothing_is_told_so_and_the_rest_is_declared(
    broker: BrokerSettings, as_user: AsUser, broker_url: str, rabbitmq: RabbitServer
) -> None:
    await apply(broker, TopologySettings(queues=(Queue(name="there"),)))
    topology = TopologySettings(
        exchanges=(Exchange(name="mine"), Exchange(name="theirs")),
        queues=(Queue(name="there"), Queue(name="theirs"), Queue(name="mine")),
    )

    results = await apply(as_user("^mine$", ".*", ".*"), topology)

    assert [each.standing for each in results] == [
        Standing.DECLARED,
        Standing.FAILED,
        Standing.FAILED,
        Standing.FAILED,
        Standing.DECLARED,
    ]
    refused = [each for each in results if each.standing is Standing.FAILED]
    assert all(each.words.startswith("ACCESS_REFUSED - ") and "docs/topology.md" in each.remedy for each in refused)
    assert set(definitions(rabbitmq, broker_url).queues) == {"mine", "there"}


@pytest.mark.parametrize(
    ("configure", "write", "read", "refused"),
    [
        ("^(e|q)$", "^(dead|q|amq.fanout)$", "^(e|q)$", set()),
        ("^e$", "^(dead|q|amq.fanout)$", "^(e|q)$", {"q", "e -> q (#)"}),
        ("^(e|q)$", "^(q|amq.fanout)$", "^(e|q)$", {"q", "e -> q (#)"}),
        ("^(e|q)$", "^(dead|q|amq.fanout)$", "^e$", {"q", "e -> q (#)"}),
        ("^(e|q)$", "^(dead|amq.fanout)$", "^(e|q)$", {"e -> q (#)"}),
        ("^(e|q)$", "^(dead|q)$", "^(e|q)$", {"e", "e -> q (#)"}),
        ("^(e|q)$", "^(dead|q|amq.fanout)$", "^q$", {"e", "e -> q (#)"}),
    ],
    ids=[
        "documented",
        "not-configure",
        "not-write-dead-letters",
        "not-read-queue",
        "not-write-queue",
        "not-write-alternate",
        "not-read-exchange",
    ],
)
async def test_each_documented_permission_is_needed_and_together_they_suffice(
    configure: str, write: str, read: str, refused: set[str], as_user: AsUser
) -> None:
    topology = TopologySettings(
        exchanges=(Exchange(name="e", alternate_exchange="amq.fanout"),),
        queues=(Queue(name="q", dead_letter_exchange="dead"),),
        bindings=(Binding(exchange="e", queue="q", routing_key="#"),),
    )

    results = await apply(as_user(configure, write, read), topology)

    assert {each.name for each in results if each.standing is Standing.FAILED} == refused
