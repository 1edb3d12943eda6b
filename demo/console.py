"""`python -m demo.console`: the web console on the data of the demo, with a relay, until Ctrl-C.

The console itself prints the address to open, as it has a token.
"""

import logging
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from demo import queue, stages
from demo.report import Report
from demo.servers import PLACE, one_demo_at_a_time, servers
from relay.config.loading import load
from relay.errors import OutboxError
from relay.operate.schema.migrate import migrate
from tests.support.process import ServerError

RELAY = Path(sys.executable).with_name("relay")


def main() -> int:
    """Serve until Ctrl-C; 0 then, and 1 when a step failed."""
    console = Console()
    logging.getLogger("aiormq").addHandler(logging.NullHandler())  # it prints what it also raises
    try:
        with one_demo_at_a_time():
            return serve(Report(console))
    except (ServerError, OutboxError) as error:
        console.print(f"[red]✗[/] {escape(str(error))}; the logs are in {PLACE}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.", highlight=False)
        return 0


def serve(report: Report) -> int:
    """Start servers, relay and console; all of them end with this call."""
    with servers(report) as environment:
        settings = load(environ=environment).settings
        with report.step("relay migrate"):
            migrate(settings.database)
            queue.declare(settings.broker)
        with stages.running_relay(environment):
            report.say("Open the address that the console prints; Ctrl-C ends it")
            return subprocess.run([RELAY, "console"], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
