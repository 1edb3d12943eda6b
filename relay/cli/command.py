"""Find the command that the arguments name, run it, and explain its errors."""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter
from pydantic import ValidationError

from relay import __version__
from relay.cli import runs_until_told
from relay.cli.exit_code import ExitCode
from relay.cli.operations import in_place
from relay.cli.printing import complain, guard_stderr
from relay.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    InboxUnavailableError,
    OutboxError,
    PartlyDoneError,
    UnavailableError,
    UsageError,
    importing,
    leaves,
)
from relay.runtime.scrub import remember_url

SHOW = "(`relay config show` tells where it was found)"
REMEDIES: dict[type[UnavailableError], str] = {
    DatabaseUnavailableError: f"check the host, database, user and password in database.url {SHOW}",
    InboxUnavailableError: "check the host, database, user and password that it names",
    BrokerUnavailableError: f"check the host, virtual host, user and password in broker.url {SHOW}",
}

# By name, so that `relay healthcheck` loads neither the engine nor the migrations.
COMMANDS = {
    "run": (
        "relay.cli.run:run",
        "Carry rows to the broker until SIGTERM; then drain and exit with 0.",
    ),
    "migrate": (
        "relay.cli.migrate:migrate",
        "Bring the tables to the version of this release.",
    ),
    "status": (
        "relay.cli.status:status",
        "Tell the backlog, the parked rows and the relays.",
    ),
    "doctor": ("relay.cli.doctor:doctor", "Look for what would not work, before a message is sent."),
    "failures": ("relay.cli.failures:app", "See what failed, grouped by its cause."),
    "parked": ("relay.cli.parked:app", "See, retry, archive or discard what could not be delivered."),
    "quarantine": (
        "relay.cli.quarantine:app",
        "See, reroute, discard or try what waits for a route that does not work; pause a route.",
    ),
    "lanes": ("relay.cli.lanes:app", "See who carries the lanes; pause and resume a lane."),
    "dead-letters": ("relay.cli.dead_letters:app", "See, send back, throw away or save what consumers gave up."),
    "held": ("relay.cli.held:app", "Let consumers try the messages that they hold."),
    "pool": ("relay.cli.pool:app", "Share partitions among consumers; tell who holds which."),
    "replay": ("relay.cli.replay:replay", "Send again what was sent."),
    "jobs": (
        "relay.cli.jobs:app",
        "List, show, pause, resume and cancel bulk work: replays, retries, discards and others.",
    ),
    "batches": (
        "relay.cli.batches:app",
        "See what Spark has written; give up a batch that was begun and will not be finished.",
    ),
    "audit": ("relay.cli.audit:app", "See who has changed or revealed what, and why."),
    "reconcile": (
        "relay.cli.reconcile:reconcile",
        "Compare what was sent with what consumers have applied.",
    ),
    "topology": ("relay.cli.topology:app", "Declare the exchanges, queues and bindings that relay.toml lists."),
    "events": (
        "relay.cli.events:app",
        "List and export the events that an application declares; compare them with an earlier export.",
    ),
    "retention": (
        "relay.cli.retention:retention",
        "Drop old days of sent rows and of the inbox.",
    ),
    "console": ("relay.cli.console:app", "Serve the web console; manage its users."),
    "config": ("relay.cli.config:app", "Tell the settings in use; print roles, alerts and examples."),
    "completion": ("relay.cli.completion:completion", "Print a script by which a shell completes commands and flags."),
    "healthcheck": (
        "relay.cli.healthcheck:healthcheck",
        "Exit with 0 if this host's relay is alive, else with 1.",
    ),
}

HELP = """Carry outbox rows from PostgreSQL to RabbitMQ: at least once, in order per key.

Settings come from flags, RELAY_ variables, secret files, relay.toml and defaults, in this order.
"""
EXIT_CODES = "Exit codes: 0 done, 1 failed or not ready, 2 usage or configuration, 3 partly done, 130 interrupted."


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code; an error of ours is one line on stderr."""
    given = in_place(list(sys.argv[1:] if arguments is None else arguments))
    _keep_secrets(given)
    try:
        with importing("relay"):  # a command's own module is imported when it runs
            code = app()(given, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        complain(f"{_usage(error)} (see `relay --help`)")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain about the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except (Exception, BaseExceptionGroup) as error:
        _begin_log(given)
        return _end(error)
    return code if isinstance(code, int) else ExitCode.DONE


def _usage(error: CycloptsError) -> str:
    """Return what is wrong with the arguments; of a request's fields each by the name of its flag."""
    if isinstance(fields := error.__cause__, ValidationError) and len(fields.errors()[0]["loc"]) > 0:
        return "; ".join(f"--{str(each['loc'][0]).replace('_', '-')}: {each['msg']}" for each in fields.errors())
    return str(error).rstrip(".")


def _keep_secrets(arguments: Sequence[str]) -> None:
    """Let no error show a password: neither of an argument, such as a URL in the wrong place, nor in a traceback."""
    for argument in arguments:
        remember_url(argument)
        remember_url(argument.partition("=")[2])
    guard_stderr()


def app() -> App:
    """Return the tree of all commands."""
    on_terminal = sys.stdout.isatty()
    relay = App(
        name="relay",
        help=HELP,
        help_epilogue=EXIT_CODES,
        version=_version,
        help_formatter="default" if on_terminal else "plain",
        help_format="plaintext",
        default_parameter=Parameter(show_default=_default, negative=""),
        suppress_keyboard_interrupt=False,
    )
    for name, (place, about) in COMMANDS.items():
        relay.command(place, name=name, help=about)
    return relay


def _version() -> str:
    from relay.engine.send.codec import CODEC  # noqa: PLC0415  (the engine, which few commands need)

    return f"relay {__version__}, codec: {CODEC}"


def _default(value: object) -> object:
    """Return the default as the help shows it; None where it says nothing."""
    return None if value in (False, "", None) else value


def _end(error: BaseException) -> ExitCode:
    """Explain errors of ours, also of tasks that failed together; a bug keeps its traceback."""
    errors = list(leaves(error)) if isinstance(error, BaseExceptionGroup) else [error]
    if all(isinstance(each, OutboxError) for each in errors):
        return max(_explain(each) for each in errors)
    if not _is_logged(repr(error), ExitCode.FAILED, error):
        raise error
    return ExitCode.FAILED


def _explain(error: BaseException) -> ExitCode:
    match error:
        case ConfigurationError() | UsageError():
            code = ExitCode.USAGE
        case PartlyDoneError():
            code = ExitCode.PARTLY
        case _:
            code = ExitCode.FAILED
    remedy = REMEDIES.get(type(error)) if isinstance(error, UnavailableError) else None
    for line in str(error).splitlines():
        words = f"{line.rstrip('.')}; {remedy}" if remedy else line
        if not _is_logged(words, code):
            complain(words)
    return code


def _begin_log(given: Sequence[str]) -> None:
    """Make stderr a log of JSON where settings could not be read, but the environment alone says that it is one."""
    log = sys.modules.get("relay.observe.log")  # not loaded: the command's module could not be imported
    if log is None or not runs_until_told(given):
        return
    import structlog  # noqa: PLC0415  (it takes longer to load than most commands to run)

    from relay.config.keys import all_keys  # noqa: PLC0415
    from relay.config.settings import LogFormat, LogSettings  # noqa: PLC0415

    (key,) = (key for key in all_keys() if key.name == "log.format")
    if not structlog.is_configured() and LogFormat.JSON in map(os.environ.get, key.variables):
        log.set_up(LogSettings(format=LogFormat.JSON))


def _is_logged(words: str, code: int, bug: BaseException | None = None) -> bool:
    """Log the end of the command where stderr is a log of JSON; return whether it is one."""
    observing = sys.modules.get("relay.observe.log")  # not loaded: the command has no log
    if observing is None or not observing.is_json():
        return False
    from relay.logger import get_logger  # noqa: PLC0415  (it takes longer to load than most commands to run)

    log = get_logger(__name__)
    log.error("relay.failed", error=words, exit_code=code, exc_info=bug)
    return True
