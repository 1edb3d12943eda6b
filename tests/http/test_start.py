"""A relay that is started before its servers waits for them, says so once, and gives up after `start_timeout`."""

from relay.config.settings import Settings
from tests.http.conftest import StartRelay
from tests.support.proxied import proxied


async def test_it_waits_for_the_database_and_then_for_the_broker(settings: Settings, start_relay: StartRelay) -> None:
    async with (
        proxied(settings.database) as (database, far_database),
        proxied(settings.broker) as (broker, far_broker),
    ):
        database.refusing = broker.refusing = True
        relay = start_relay(
            RELAY_DATABASE_URL=far_database.url.get_secret_value(),
            RELAY_BROKER_URL=far_broker.url.get_secret_value(),
        )
        await relay.wait_for_log("database.degraded")
        await relay.wait_for_log("broker.degraded")
        assert (await relay.site.get("/livez")).status == 200

        database.refusing = False
        await relay.wait_for_log("database.healed")
        assert (await relay.site.get("/readyz")).status == 503
        broker.refusing = False
        await relay.wait_for_log("relay.ready")
        waited = [event for event in relay.events() if str(event["event"]).endswith(".degraded")]

    assert {event["event"] for event in waited} == {"database.degraded", "broker.degraded"}
    assert all(0 < event["gives_up_in_s"] <= 60 for event in waited)
    reasons = [event["reason"] for event in waited]
    assert len(reasons) == len(set(reasons))  # nothing is said twice, however often it tried


async def test_it_gives_up_in_the_end(settings: Settings, start_relay: StartRelay) -> None:
    async with proxied(settings.broker) as (broker, far):
        broker.refusing = True
        relay = start_relay(RELAY_BROKER_URL=far.url.get_secret_value(), RELAY_START_TIMEOUT="1")

        assert await relay.wait_for_end() == 1

    end = relay.events()[-1]
    assert (end["event"], end["level"], end["exit_code"]) == ("relay.failed", "error", 1)
    assert str(end["error"]).startswith(f"127.0.0.1:{broker.port}: ")
    assert "relay config show" in str(end["error"])
