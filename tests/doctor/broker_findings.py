"""Read the broker's part of the checklist."""

from collections import defaultdict

from pydantic import SecretStr

from relay.config.settings import Settings
from relay.operate.doctor.broker import examine_broker
from relay.operate.doctor.finding import Finding, Verdict


async def look(settings: Settings) -> dict[str, list[Finding]]:
    """Return the findings by check."""
    found: dict[str, list[Finding]] = defaultdict(list)
    async for finding in examine_broker(settings):
        found[finding.name].append(finding)
    return found


async def findings_of(settings: Settings, name: str) -> list[Finding]:
    """Return the findings of one check, in their order."""
    return (await look(settings))[name]


async def verdict(settings: Settings, name: str) -> Verdict:
    """Return the verdict of a check that has one finding."""
    (finding,) = await findings_of(settings, name)
    return finding.verdict


def changed(settings: Settings, section: str, **values: object) -> Settings:
    """Return settings of which some in a section are others."""
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})


def at(settings: Settings, *urls: str) -> Settings:
    """Return settings of which the broker has these hosts."""
    return changed(settings, "broker", url=SecretStr(",".join(urls)))
