"""The doctor's findings, found once for all who ask."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from relay.config.settings import Settings
from relay.logger import get_logger
from relay.operate.doctor.finding import Finding, Verdict, worst
from relay.operate.doctor.run import examine

EVERY = 600.0  # seconds between two runs while nobody asks
EVERY_WHILE_FAILING = 30.0  # so that what is mended leaves the first page
FRESH = 10.0  # seconds in which another run is not worth its connections
RIGHTS = "database.rights"  # of the relay's login, which the console does not have

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CheckupReport:
    """What one run has found."""

    at: datetime
    findings: list[Finding]
    seconds: float

    @property
    def worst(self) -> Verdict:
        return worst(self.findings)


class Checkup:
    """Runs the doctor from time to time, and when a user asks."""

    def __init__(self, settings: Settings, file: Path | None) -> None:
        self._settings = settings
        self._file = file
        self._running = asyncio.Lock()
        self._examined_at = 0.0  # monotonic
        self.latest: CheckupReport | None = None

    async def run(self) -> None:
        """Examine from time to time, until cancelled."""
        while True:
            try:
                await self.report(newest=True)
            except Exception as error:  # the next run may go well
                log.error("console.checkup_failed", exc_info=error)
            is_failing = self.latest is not None and self.latest.worst is Verdict.FAILED
            await asyncio.sleep(EVERY_WHILE_FAILING if is_failing else EVERY)

    async def report(self, *, newest: bool = False) -> CheckupReport:
        """Return the latest report; with `newest` one that is a few seconds old at most."""
        async with self._running:
            if self.latest is None or (newest and self._age() > FRESH):
                self.latest = await run_in_threadpool(self._examine)
                self._examined_at = time.monotonic()
        return self.latest

    def _age(self) -> float:
        return time.monotonic() - self._examined_at

    def _examine(self) -> CheckupReport:
        begun = time.monotonic()
        findings = [
            Finding(each.check, Verdict.SKIPPED, "the console has another login: run `relay doctor` as the relay")
            if each.check == RIGHTS
            else each
            for each in examine(self._settings, self._file)
        ]
        return CheckupReport(datetime.now(UTC), findings, time.monotonic() - begun)
