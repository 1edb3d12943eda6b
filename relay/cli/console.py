"""`relay console`."""

import asyncio

from cyclopts import App

from relay.cli.exit_code import ExitCode
from relay.cli.options import Options
from relay.errors import importing
from relay.observe import log

with importing("console"):
    from relay.console.serve import serve

app = App(name="console", help="Serve the web console; manage its users.")


@app.default
def console(*, options: Options = Options()) -> ExitCode:
    """Serve the web console until SIGTERM or Ctrl-C; then exit with 0."""
    settings = options.load().settings
    log.set_up(settings.log)
    asyncio.run(serve(settings))
    return ExitCode.DONE
