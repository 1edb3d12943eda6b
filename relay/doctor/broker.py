"""The broker's part of the checklist."""

from collections.abc import AsyncIterator

from relay.broker import connect
from relay.doctor.finding import Finding, Verdict
from relay.errors import BrokerUnavailableError
from relay.settings import Settings


async def examine_broker(settings: Settings) -> AsyncIterator[Finding]:
    """Look at the broker."""
    check = "broker.connection"
    try:
        connection = await connect(settings.broker, "outbox-relay doctor")
    except BrokerUnavailableError as error:
        yield Finding(check, Verdict.FAILED, str(error), "check host, virtual host, user and password in broker.url")
    else:
        yield Finding(check, Verdict.OK, f"{connection.url.host} lets us in")
        await connection.close()
