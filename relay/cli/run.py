"""`relay run`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvloop

from relay.cli.options import Options
from relay.config.settings import Settings
from relay.consume.pool.candidate import candidate_beside
from relay.engine.node import Node, serve
from relay.errors import DatabaseUnavailableError
from relay.observe import log, tracing
from relay.operate.doctor.run import warning
from relay.operate.session import session
from relay.probes.node import answering_for
from relay.runtime.stopping import ending_in_time


def run(*, options: Options = Options()) -> int:
    """Carry pending rows to the broker until SIGTERM or Ctrl-C, then drain and exit with 0.

    At SIGHUP it reads the configuration again and takes over the hosts of `broker.url`.
    """

    def load() -> Settings:
        return options.load().settings

    @asynccontextmanager
    async def beside(node: Node) -> AsyncIterator[None]:
        async with (
            ending_in_time(node.drain, settings.relay.drain_timeout),
            answering_for(node, settings),
            warning(settings, node),
            candidate_beside(settings),
        ):
            yield

    settings = load()
    log.set_up(settings.log)
    end_tracing = tracing.set_up(os.environ)
    # What is not reachable yet is waited for by `serve`, within the time-out for the start.
    with suppress(DatabaseUnavailableError), session(settings.database):
        pass
    try:
        return uvloop.run(serve(settings, beside, load))
    finally:
        end_tracing()
