"""`/readyz` is truthful when a peer falls silent, which no connection reports."""

from pydantic import SecretStr

from relay.config.settings import Settings
from tests.http.conftest import RunSite
from tests.http.site import Site
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.postgres import PostgresServer
from tests.support.proxy import FaultProxy, Way
from tests.support.rabbitmq import RabbitServer


async def test_a_silent_broker_makes_it_unready_while_rows_wait(
    settings: Settings, rabbitmq: RabbitServer, rows: Rows, run_site: RunSite
) -> None:
    async with FaultProxy("127.0.0.1", rabbitmq.port) as proxy:
        url = settings.broker.url.get_secret_value().replace(f":{rabbitmq.port}/", f":{proxy.port}/")
        broker = settings.broker.model_copy(update={"url": SecretStr(url)})
        async with run_site(settings.model_copy(update={"broker": broker}), stall_after=0.5) as site:
            await eventually(site.is_ready, "ready")
            proxy.hold(Way.DOWN)
            rows.pending(exchange="", routing_key="nobody")

            await eventually(lambda: is_unready(site, "delivery: nothing has settled for "), "stalled")
            await eventually(lambda: told(rows) == "stalled", "the node's row says so")
            assert await site.value("outbox_ready") == 0
            assert (await site.get("/livez")).status == 200

            proxy.release(Way.DOWN)
            await eventually(site.is_ready, "ready again")
            await eventually(lambda: told(rows) == "ok", "the node's row says so")


async def test_a_silent_broker_makes_it_unready_also_without_a_row(
    settings: Settings, rabbitmq: RabbitServer, run_site: RunSite
) -> None:
    async with FaultProxy("127.0.0.1", rabbitmq.port) as proxy:
        url = settings.broker.url.get_secret_value().replace(f":{rabbitmq.port}/", f":{proxy.port}/")
        broker = settings.broker.model_copy(update={"url": SecretStr(url), "heartbeat": 1})
        async with run_site(settings.model_copy(update={"broker": broker})) as site:
            await eventually(site.is_ready, "ready")
            proxy.hold(Way.DOWN)

            await eventually(lambda: is_unready(site, "broker: nothing has come from it for 1.5 s"), "unready")

            proxy.release(Way.DOWN)
            await eventually(site.is_ready, "ready again")


async def test_a_silent_database_makes_it_unready_also_without_a_row(
    settings: Settings, postgres: PostgresServer, run_site: RunSite
) -> None:
    async with FaultProxy("127.0.0.1", postgres.port, amqp=False) as proxy:
        url = settings.database.url.get_secret_value().replace(f":{postgres.port}/", f":{proxy.port}/")
        database = settings.database.model_copy(update={"url": SecretStr(url)})
        async with run_site(settings.model_copy(update={"database": database}), stall_after=0.5) as site:
            await eventually(site.is_ready, "ready")
            proxy.hold(Way.DOWN)

            await eventually(lambda: is_unready(site, "database: it has not answered for more than 0.7 s"), "unready")

            proxy.release(Way.DOWN)
            await eventually(site.is_ready, "ready again")


async def is_unready(site: Site, words: str) -> bool:
    answer = await site.get("/readyz")
    return answer.status == 503 and words in answer.body


def told(rows: Rows) -> str:
    found = rows.connection.execute("SELECT state FROM outbox.node").fetchone()
    return "" if found is None else str(found[0])
