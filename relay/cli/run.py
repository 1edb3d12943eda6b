"""`relay run`."""

import os
from contextlib import suppress
from functools import partial

import uvloop

from relay.cli.options import Options
from relay.database import refuse_pooler
from relay.errors import DatabaseUnavailableError
from relay.observe import log, tracing
from relay.operate.session import session


def run(*, options: Options | None = None) -> int:
    """Carry pending rows to the broker until SIGTERM or Ctrl-C, then drain and exit with 0."""
    # Here, so that the help of the other commands need not load the engine.
    from relay.engine.node import serve  # noqa: PLC0415
    from relay.http.server import answering  # noqa: PLC0415

    settings = (options or Options()).load().settings
    log.set_up(settings.log)
    end_tracing = tracing.set_up(os.environ)
    # What is not reachable yet is waited for by `serve`, within the time-out for the start.
    with suppress(DatabaseUnavailableError), session(settings.database):
        uvloop.run(refuse_pooler(settings.database))
    try:
        return uvloop.run(serve(settings, partial(answering, settings)))
    finally:
        end_tracing()
