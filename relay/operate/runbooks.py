"""The runbooks: which one helps with a reason. docs/runbooks has their pages, and those of the alerts."""

from enum import StrEnum
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema


class Runbook(StrEnum):
    """A page that a reason leads to; an alert leads to the page of its name."""

    CONSOLE = "OutboxConsoleTask"
    CONSUMER_DEAD_LETTERS = "OutboxConsumerDeadLetters"
    CONSUMER_DOWN = "OutboxConsumerDown"
    CONSUMER_HELD = "OutboxConsumerHeldGrows"
    CONSUMER_LAG = "OutboxConsumerLag"
    DATABASE_LOST = "OutboxDatabaseLost"
    DOCTOR = "OutboxDoctor"
    FEWER_RELAYS = "OutboxFewerRelays"
    KEY_STUCK = "OutboxKeyStuck"
    LANE_LOST = "OutboxLaneLost"
    PARKED = "OutboxParked"
    PAUSED = "OutboxPaused"
    RELAY_DOWN = "OutboxRelayDown"
    ROUTE = "OutboxRouteQuarantined"
    ROWS_OVERTAKEN = "OutboxRowsOvertaken"
    SESSION = "OutboxSession"
    STALLED = "OutboxStalled"


# What a relay says begins with the part that does not work (relay/runtime/health.py).
OF_PART = {
    "broker": Runbook.RELAY_DOWN,
    "database": Runbook.DATABASE_LOST,
    "delivery": Runbook.STALLED,
    "history": Runbook.ROWS_OVERTAKEN,
    "lanes": Runbook.LANE_LOST,
    "queues": Runbook.STALLED,
    "routes": Runbook.ROUTE,
}


def of_relay(reason: str) -> Runbook:
    """Return the runbook for what a relay says of itself."""
    return OF_PART.get(reason.partition(":")[0], Runbook.RELAY_DOWN)


class Guided(str):
    """Words with the runbook that helps; JSON has the words alone."""

    __slots__ = ("runbook",)

    def __new__(cls, words: str, runbook: Runbook) -> "Guided":
        guided = super().__new__(cls, words)
        guided.runbook = runbook
        return guided

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(str)

    runbook: Runbook
