"""`relay run`."""

from contextlib import suppress
from functools import partial

import uvloop

from relay.cli.options import Options
from relay.errors import DatabaseUnavailableError
from relay.observe.log import set_up
from relay.operate.session import session


def run(*, options: Options | None = None) -> int:
    """Carry pending rows to the broker until SIGTERM or Ctrl-C, then drain and exit with 0."""
    # Here, so that the help of the other commands need not load the engine.
    from relay.engine.node import serve  # noqa: PLC0415
    from relay.http.server import answering  # noqa: PLC0415

    settings = (options or Options()).load().settings
    set_up(settings.log)
    # What is not reachable yet is waited for by `serve`, within the time-out for the start.
    with suppress(DatabaseUnavailableError), session(settings.database):
        pass
    return uvloop.run(serve(settings, partial(answering, settings)))
