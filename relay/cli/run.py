"""`relay run`."""

import asyncio

from relay.cli.options import Options
from relay.observe.log import set_up


def run(*, options: Options | None = None) -> int:
    """Carry pending rows to the broker until SIGTERM or Ctrl-C, then drain and exit with 0."""
    from relay.engine.node import serve  # noqa: PLC0415  # the help of the other commands need not load the engine

    settings = (options or Options()).load().settings
    set_up(settings.log)
    return asyncio.run(serve(settings))
