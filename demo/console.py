"""`python -m demo.console`: the web console of a shop in which something is broken, until Ctrl-C.

Relay, consumer and servers are real. SQL writes the rows, and demo/faults.py says what comes of them.
"""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg
from rich.console import Console
from rich.markup import escape

from demo import queue
from demo.faults import FAULTS, Fault, Shop, break_route
from demo.report import Report, Step
from demo.servers import PLACE, one_demo_at_a_time, servers
from demo.shop import TABLE
from demo.stages import COMMANDS, LOOK_EVERY, run_command, running_relay, running_shop
from relay.config.loading import load
from relay.errors import OutboxError
from relay.operate.schema.migrate import migrate
from relay.testing.servers.process import Process, ServerError

SETTINGS = Path(__file__).with_name("shop.toml")
FAULT_WITHIN = 60.0  # seconds


def main() -> int:
    """Serve until Ctrl-C; 0 then, and 1 when a step failed."""
    console = Console()
    logging.getLogger("aiormq").addHandler(logging.NullHandler())  # it prints what it also raises
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with one_demo_at_a_time():
            serve(Report(console))
    except (ServerError, OutboxError, psycopg.Error) as error:
        console.print(f"[red]✗[/] {escape(str(error))}; the logs are in {PLACE}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.", highlight=False)
    return 0


def serve(report: Report) -> None:
    """Start servers, relay, consumer and console; all of them end with this call.

    Raises:
        ServerError: one of them ended by itself.
    """
    with servers(report) as environment:
        environment["RELAY_CONFIG"] = str(SETTINGS)
        settings = load(environ=environment).settings
        with report.step("relay migrate"):
            migrate(settings.database)
        with report.step("relay topology apply") as step:
            applied = run_command("topology", ["topology", "apply"], environment)
            if applied.returncode:
                raise ServerError(f"relay topology apply failed with code {applied.returncode}\n{applied.log_end()}")
            queue.declare(settings.broker)  # what `make demo` has left pending goes there
            break_route(settings.broker)
            step.note("of demo/shop.toml; then a binding is taken away")
        with psycopg.connect(environment["RELAY_DATABASE_URL"], autocommit=True) as connection:
            connection.execute(TABLE)
            shop = Shop(connection, settings.broker, environment)
            with running_relay(environment) as relay, running_shop(environment) as consumer:
                for fault in FAULTS:
                    with report.step(fault.name) as step:
                        _bring(fault, shop, [relay, consumer], step)
                report.say("The console prints its address once it listens; Ctrl-C ends it")
                _serve_console(shop, environment)


def _bring(fault: Fault, shop: Shop, processes: Sequence[Process], step: Step) -> None:
    """Return once a fault is there; an earlier run may have left it."""
    if not fault.count(shop):
        fault.bring(shop)
    until = time.monotonic() + FAULT_WITHIN
    while not (number := fault.count(shop)):
        for process in processes:
            if not process.is_running():
                raise ServerError(f"{process.name} ended with code {process.returncode}\n{process.log_end()}")
        if time.monotonic() > until:
            raise ServerError(f"{fault.name}: not within {FAULT_WITHIN:g} s")
        time.sleep(LOOK_EVERY)
    step.note(f"{number:,}")


def _serve_console(shop: Shop, environment: Mapping[str, str]) -> None:
    """Run the console, which prints its address once it listens, and let the shop trade until it ends."""
    log = PLACE / "console.log"
    with log.open("w") as output:
        console = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "--", COMMANDS / "relay", "console"], env=environment, stderr=output
        )
        with console:
            try:
                while console.poll() is None:
                    shop.trade()
                    time.sleep(1)
            finally:
                console.terminate()
    if console.returncode:
        raise ServerError(f"relay console ended with code {console.returncode}\n{log.read_text().strip()}")


if __name__ == "__main__":
    sys.exit(main())
