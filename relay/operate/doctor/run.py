"""Gather what every part of the checklist found."""

import asyncio
from pathlib import Path

from relay.config.settings import Settings
from relay.operate.asked import Closed, Nothing
from relay.operate.doctor.broker import examine_broker
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.exposure import exposure
from relay.operate.doctor.finding import Finding, Verdict, worst
from relay.operate.doctor.memory import memory
from relay.operate.doctor.review import review
from relay.operate.doctor.routes import routes
from relay.operate.operation import Role, Servers, operation


def examine(settings: Settings, file: Path | None = None) -> list[Finding]:
    """Look at everything, part by part; a part that cannot be reached does not keep the others from being looked at.

    `file` is the relay.toml that was read. Nothing is changed, and no message reaches a queue of yours.
    """
    return [
        *exposure(settings, file=file),
        memory(settings.relay),
        *routes(settings),
        *examine_database(settings),
        *asyncio.run(_broker(settings)),
        *review(settings),
    ]


async def _broker(settings: Settings) -> list[Finding]:
    return [finding async for finding in examine_broker(settings)]


class Checklist(Closed):
    """What the doctor has found."""

    verdict: Verdict
    findings: list[Finding]


@operation("doctor", "GET /doctor", Role.VIEWER, is_alone=True)
def doctor(at: Servers, _: Nothing) -> Checklist:
    """Look for what would not work before a message is sent; changes nothing."""
    findings = examine(at.settings, at.file)
    return Checklist(verdict=worst(findings), findings=findings)
