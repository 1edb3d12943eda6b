"""The relay's database sessions: the settings that lead to them, a query for them, and the losses it reports."""

from pydantic import SecretStr

from relay.config.settings import Settings
from tests.support.events import Events, named

RELAY_SESSIONS = "FROM pg_stat_activity WHERE application_name = 'outbox-relay/log' AND datname = current_database()"


def with_database(settings: Settings, url: str, **more: float) -> Settings:
    """Return the settings of a relay on another database; `more`: further values of [database]."""
    database = settings.database.model_copy(update={"url": SecretStr(url), **more})
    return settings.model_copy(update={"database": database})


def reasons(events: Events) -> str:
    """Return the reasons for which the database was degraded, one a line."""
    return "\n".join(event["reason"] for event in named(events, "database.degraded"))
