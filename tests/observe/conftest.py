"""A relay and a consumer that a real Prometheus watches by the rules of config/prometheus."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aio_pika
import pytest

from relay.config.settings import BrokerSettings, Settings
from relay.consume import Consumer, FailurePolicy, Inbox, WorkPolicy
from relay.consume.apply.handlers import AsyncHandler
from relay.probes import cached_answer
from relay.probes.consumer import answering_for
from relay.testing.servers.process import free_port
from tests.consume.conftest import inbox, queue, table
from tests.consume.effects import QUEUE, count, running
from tests.http.conftest import RunSite, rows, run_site
from tests.http.site import Site
from tests.observe.rules import RULES
from tests.support.eventually import eventually
from tests.support.prometheus import Prometheus, is_installed

__all__ = ["inbox", "queue", "rows", "run_site", "table"]  # fixtures

POISON_LIMIT = 3


def quick_rules() -> str:
    """Return the rules with seconds in place of minutes and hours, but for those of the objectives.

    What lasts for seconds uses up no objective of 30 days: theirs must keep quiet as they are.
    """
    faults, objectives = RULES.read_text().split("  - name: outbox-objectives\n")
    return (
        re.sub(r"(?<=for: )(\d+)[mh]|(?<=\[)(\d+)[mh](?=\])", lambda found: f"{found[1] or found[2]}s", faults)
        + f"  - name: outbox-objectives\n{objectives}"
    )


@dataclass(frozen=True, slots=True)
class Watched:
    """A relay and a consumer, and who watches them."""

    prometheus: Prometheus
    relay: Site
    consumer: Consumer

    async def fires_alone(self, alert: str) -> None:
        """Wait until this alert fires; no other may meanwhile."""
        await eventually(lambda: self._fires({alert}) == {alert}, f"{alert} fires", within=90)

    async def ends(self, alert: str) -> None:
        """Wait until no alert fires; no other may meanwhile."""
        await eventually(lambda: not self._fires({alert}), f"{alert} is over", within=90)

    def _fires(self, expected: set[str]) -> set[str]:
        firing = self.prometheus.firing()
        assert firing <= expected
        return firing


Watch = Callable[..., AbstractAsyncContextManager[Watched]]


@pytest.fixture
def watch(run_site: RunSite, queue: object, inbox: Inbox, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """`async with watch() as watched:` begins with everything in order, but for what `already` may fire by then."""
    if not is_installed():
        pytest.skip("Prometheus is not installed: only root can install it")
    monkeypatch.setattr(cached_answer, "FRESH_FOR", 0.0)
    monkeypatch.setattr(cached_answer, "SHARE", 0)

    @asynccontextmanager
    async def watched(
        *handlers: AsyncHandler,
        broker: BrokerSettings = settings.broker,
        failures: FailurePolicy = FailurePolicy(poison_limit=POISON_LIMIT),  # noqa: B008 (immutable)
        rules: str = quick_rules(),
        already: str | None = None,
        **relay: Any,
    ) -> AsyncIterator[Watched]:
        await take_events(broker.url.get_secret_value())
        work = WorkPolicy(stall_after=2.0)
        consumer = Consumer(QUEUE, handlers or [count], inbox=inbox, broker=broker, failures=failures, work=work)
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(
                run_site(settings.model_copy(update={"broker": broker}), **{"stall_after": 2.0, **relay})
            )
            await eventually(site.is_ready, "the relay is ready")
            address = f"127.0.0.1:{free_port()}"
            await stack.enter_async_context(answering_for(consumer, address))
            prometheus = stack.enter_context(Prometheus({"relay": site.address, "consumer": address}, rules))
            # What the consumer counts begins at 0 for Prometheus, too.
            await eventually(lambda: scraped(prometheus, ["outbox_ready", "outbox_consumer_ready"]), "both are scraped")
            await stack.enter_async_context(running(consumer))
            await eventually(lambda: value(prometheus, "sum(outbox_consumer_ready)") == 1, "the consumer is ready")
            await eventually(lambda: prometheus.firing() <= {already}, "no alert fires")
            yield Watched(prometheus, site, consumer)

    return watched


async def take_events(broker_url: str) -> None:
    """Declare queues for what the relay sends, and for the consumer."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.declare_queue("events", durable=True)).bind(exchange, "invoice.*")
        await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})


def scraped(prometheus: Prometheus, names: Sequence[str]) -> bool:
    return all(prometheus.query(name) for name in names)


def value(prometheus: Prometheus, expression: str) -> float | None:
    """Return the value of an expression with one series at most."""
    found = prometheus.query(expression)
    return float(found[0]["value"][1]) if found else None
