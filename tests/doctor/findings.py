"""Read the database's part of the checklist."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.finding import Finding, Verdict

OK, WARNING, FAILED, SKIPPED = Verdict


def at(url: str) -> Settings:
    return Settings(database=DatabaseSettings(url=SecretStr(url)))


def look(settings: Settings, check: str) -> list[Finding]:
    """Return the findings of one check of the database."""
    found = [finding for finding in examine_database(settings) if finding.check == check]
    assert found, f"{check} is not on the list"
    return found


def verdicts(settings: Settings, check: str) -> list[Verdict]:
    return [finding.verdict for finding in look(settings, check)]


@contextmanager
def operator(settings: Settings) -> Iterator[psycopg.Connection]:
    """Yield a superuser's session in the database."""
    with psycopg.connect(settings.database.url.get_secret_value(), autocommit=True) as connection:
        yield connection
