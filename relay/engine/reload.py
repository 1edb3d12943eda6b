"""Read the configuration again at SIGHUP and take over the broker's hosts; everything else needs a restart."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from pydantic import SecretStr

from relay.config.keys import all_keys, value_of
from relay.config.settings import Settings
from relay.errors import ConfigurationError
from relay.logger import get_logger
from relay.runtime.stopping import at_signal
from relay.servers.rabbitmq.hosts import broker_urls, place

log = get_logger(__name__)

TAKEN_OVER = "broker.url"


UseHosts = Callable[[SecretStr], Awaitable[None]]


@asynccontextmanager
async def reloading(load: Callable[[], Settings], settings: Settings, use_hosts: UseHosts) -> AsyncIterator[None]:
    """Within the block, call `load` at each SIGHUP and pass its `broker.url` to `use_hosts`.

    Args:
        settings: as they were at the start.
    """
    asked = asyncio.Event()
    rereading = asyncio.create_task(_reload_whenever(asked, load, settings, use_hosts), name="reload")
    try:
        with at_signal(signal.SIGHUP, asked.set):
            yield
    finally:
        rereading.cancel()
        with suppress(asyncio.CancelledError):
            await rereading


async def _reload_whenever(
    asked: asyncio.Event, load: Callable[[], Settings], settings: Settings, use_hosts: UseHosts
) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            found = await asyncio.to_thread(load)
            hosts = [place(url) for url in broker_urls(found.broker)]
        except (ConfigurationError, OSError) as error:
            log.error("configuration.refused", reason=str(error))
            continue
        except Exception as error:  # the next file may be read; the relay goes on with what it has
            log.error("configuration.refused", reason=f"a fault of the relay: {type(error).__name__}", exc_info=error)
            continue
        changed = [key.name for key in all_keys() if value_of(found, key) != value_of(settings, key)]
        log.info("configuration.reloaded", hosts=hosts, needs_restart=[name for name in changed if name != TAKEN_OVER])
        await use_hosts(found.broker.url)
