"""`/readyz` is truthful when a peer falls silent, which no connection reports."""

import pytest

from relay.config.settings import Settings
from relay.errors import PublicReason
from relay.runtime.hindrance import Hindrance
from tests.http.conftest import RunSite
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way


async def test_a_silent_broker_makes_it_unready_while_rows_wait(
    settings: Settings, rows: Rows, run_site: RunSite
) -> None:
    async with (
        proxied(settings.broker) as (proxy, far),
        run_site(settings.model_copy(update={"broker": far}), stall_after=0.5) as site,
    ):
        await eventually(site.is_ready, "ready")
        proxy.hold(Way.DOWN)
        rows.pending(exchange="", routing_key="nobody")

        await eventually(lambda: site.is_unready("delivery: nothing has settled for "), "stalled")
        await eventually(lambda: told(rows) == "stalled", "the node's row says so")
        assert await site.value("outbox_ready") == 0
        assert (await site.get("/livez")).status == 200

        proxy.release(Way.DOWN)
        await eventually(site.is_ready, "ready again")
        await eventually(lambda: told(rows) == "ok", "the node's row says so")


@pytest.fixture(params=["as it is", "in other words"])
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each reason that is made meanwhile have these words, and the same public reason."""
    if request.param != "as it is":
        made = Hindrance.__new__
        reworded = staticmethod(lambda cls, _, public=PublicReason.UNNAMED: made(cls, request.param, public))
        monkeypatch.setattr(Hindrance, "__new__", reworded)


@pytest.mark.usefixtures("words")
async def test_a_silent_broker_makes_it_unready_also_without_a_row(settings: Settings, run_site: RunSite) -> None:
    """The words of the reasons change nothing of what a probe shows."""
    async with (
        proxied(settings.broker, heartbeat=1) as (proxy, far),
        run_site(settings.model_copy(update={"broker": far})) as site,
    ):
        await eventually(site.is_ready, "ready")
        proxy.hold(Way.DOWN)

        await eventually(lambda: site.is_unready("broker: nothing has come from it for 1.5 s"), "unready")

        proxy.release(Way.DOWN)
        await eventually(site.is_ready, "ready again")


async def test_a_silent_database_makes_it_unready_also_without_a_row(settings: Settings, run_site: RunSite) -> None:
    async with (
        proxied(settings.database) as (proxy, far),
        run_site(settings.model_copy(update={"database": far}), stall_after=0.5) as site,
    ):
        await eventually(site.is_ready, "ready")
        proxy.hold(Way.DOWN)

        await eventually(lambda: site.is_unready("database: it has not answered for more than 0.7 s"), "unready")

        proxy.release(Way.DOWN)
        await eventually(site.is_ready, "ready again")


def told(rows: Rows) -> str:
    found = rows.connection.execute("SELECT state FROM outbox.node").fetchone()
    return "" if found is None else str(found[0])
