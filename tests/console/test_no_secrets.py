"""No page and no answer of the API shows a password of the settings, whatever the servers say to it."""

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from relay.config.settings import BrokerSettings, Settings
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.routes import PARAMETER, routes
from tests.console.site import browser, log_in, running, users

SECRETS = ["aKx7qWZp4w9", "bKx7qWZp4w9", "cKx7qWZp4w9"]
ENDLESS = "/live"


async def test_no_answer_shows_a_secret(settings: Settings, tmp_path: Path, database_url: str) -> None:
    fill(database_url)
    broker, database = urlsplit(settings.broker.url.get_secret_value()), urlsplit(database_url)
    refused = settings.model_copy(
        update={"broker": BrokerSettings(url=SecretStr(f"amqp://guest:{SECRETS[0]}@127.0.0.1:{broker.port}/"))}
    )
    section = {
        **users(tmp_path),
        "inbox_url": f"postgresql://postgres:{SECRETS[1]}@127.0.0.1:{database.port}/inbox",
        "oidc_client_secret": SECRETS[2],
    }
    async with running(refused, **section) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        told = {}
        for route in routes(app):
            if "GET" in (route.methods or ()) and route.path != ENDLESS:
                path = PARAMETER.sub("1", route.path or "")
                told[path] = await client.get(path, params={"queue": "billing", "since": "1h"})

    assert [path for path, answer in told.items() if any(secret in answer.text for secret in SECRETS)] == []
    assert {"/routes", "/doctor", "/api/v1/doctor"} <= told.keys()
    assert "ACCESS_REFUSED" in told["/api/v1/doctor"].text  # the broker was asked with the first of them
