"""What keeps this node from delivering, in words for the operator."""

import structlog

log = structlog.get_logger(__name__)


class Health:
    """Reasons by part ("broker", "database", ...); none of them: all is well."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._expected: dict[str, str] = {}
        self._told: dict[str, set[str]] = {}

    def expect(self, part: str, reason: str) -> None:
        """A part is not there yet, and nothing is wrong so far."""
        self._expected[part] = reason

    def degrade(self, part: str, reason: str, **more: object) -> None:
        """A part does not work; each reason is logged once, with `more`, until the part works again."""
        self._reasons[part] = reason
        told = self._told.setdefault(part, set())
        if reason not in told:
            told.add(reason)
            log.warning(f"{part}.degraded", reason=reason, **more)

    def heal(self, part: str) -> None:
        self._expected.pop(part, None)
        self._told.pop(part, None)
        if self._reasons.pop(part, None) is not None:
            log.info(f"{part}.healed")

    @property
    def hindrances(self) -> dict[str, str]:
        """What keeps us from delivering at this moment, by part; with what is only expected yet."""
        return self._expected | self._reasons

    @property
    def state(self) -> str:
        return "degraded" if self._reasons else "ok"

    @property
    def reasons(self) -> list[str]:
        return [f"{part}: {reason}" for part, reason in sorted(self._reasons.items())]
