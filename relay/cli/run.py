"""`relay run`."""

import os
import signal
from contextlib import suppress
from functools import partial

import uvloop

from relay.cli.options import Options
from relay.database import refuse_pooler
from relay.errors import DatabaseUnavailableError
from relay.observe import log, tracing
from relay.operate.session import session
from relay.settings import Settings


def run(*, options: Options | None = None) -> int:
    """Carry pending rows to the broker until SIGTERM or Ctrl-C, then drain and exit with 0.

    At SIGHUP it reads the configuration again and takes over the hosts of `broker.url`.
    """
    # Here, so that the help of the other commands need not load the engine.
    from relay.engine.node import serve  # noqa: PLC0415
    from relay.http.server import answering  # noqa: PLC0415

    # Until `serve` does something at it: who tells of new hosts must not end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def load() -> Settings:
        return (options or Options()).load().settings

    settings = load()
    log.set_up(settings.log)
    end_tracing = tracing.set_up(os.environ)
    # What is not reachable yet is waited for by `serve`, within the time-out for the start.
    with suppress(DatabaseUnavailableError), session(settings.database):
        uvloop.run(refuse_pooler(settings.database))
    try:
        return uvloop.run(serve(settings, partial(answering, settings), load))
    finally:
        end_tracing()
