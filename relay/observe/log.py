"""Set up the log: readable events on a terminal, else one JSON object a line; never a password."""

import logging
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from relay.config.settings import LogFormat, LogSettings
from relay.errors import importing
from relay.observe.printable import printable, printable_lines
from relay.runtime.scrub import scrub

with importing("publisher"):
    import structlog
    from structlog.types import EventDict, Processor, WrappedLogger

# At debug and info the libraries log every frame, with its payload.
LIBRARIES_FROM = logging.WARNING

# These libraries log a broken connection as an error, with a traceback of their code. The relay reconnects by itself,
# and logs what an operator must know (`broker.degraded`).
AMQP_LIBRARIES = {"aio_pika", "aiormq"}
# Logged at each try to connect, in addition to the exception that the caller gets: every few seconds of an outage.
FAILED_TRY = "error when creating transport: %r"

# The event of a library's line, by the first part of its logger's name. Its words change with its releases.
LIBRARIES = {
    "aio_pika": "broker.library_warned",
    "aiormq": "broker.library_warned",
    "pamqp": "broker.library_warned",
    "psycopg": "database.library_warned",
    "sqlalchemy": "database.library_warned",
    "alembic": "schema.library_warned",
    "uvicorn": "console.library_warned",
    "starlette": "console.library_warned",
    "fastapi": "console.library_warned",
}
OTHER_LIBRARY = "library.warned"
# Libraries log the `repr` of their objects, whose address differs each time.
ADDRESS = re.compile(r"(?: at)? 0x[0-9a-f]{6,}")

# Names that this code chooses: a password that is the word "relay" must not change the name of an event.
OURS = frozenset({"level", "timestamp", "logger"})
EVENT_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def set_up(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send the events of structlog, and the libraries' records from warning on, to `stream` (stderr).

    stdout is for the results of commands.
    """
    output = stream or sys.stderr
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_logger,
        cache_logger_on_first_use=False,  # modules make their loggers before this runs
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, _with_our_name, *_shared()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _without_addresses,
                *_final(settings.format, output),
            ],
        )
    )
    handler.addFilter(_AmqpLibraries(level))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, LIBRARIES_FROM))
    logging.getLogger("relay").setLevel(level)
    logging.captureWarnings(True)


def is_json() -> bool:
    """Whether `set_up` logs JSON to stderr."""
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream is sys.stderr
        and isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter)
        and isinstance(handler.formatter.processors[-1], structlog.processors.JSONRenderer)
        for handler in logging.getLogger().handlers
    )


def keep_libraries_quiet() -> None:
    """Keep the AMQP libraries from writing to stderr: the result of the command says what went wrong."""
    for library in AMQP_LIBRARIES:
        logging.getLogger(library).addHandler(logging.NullHandler())


class _AmqpLibraries(logging.Filter):
    """Log each record of the AMQP libraries as a warning of one line, without repeats; at debug, log it in full."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in AMQP_LIBRARIES:
            return True  # a traceback from any other code shows a bug, and stays
        if self.level > logging.DEBUG and record.msg == FAILED_TRY:
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        if record.exc_info and self.level > logging.DEBUG:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]!r}", ()
            record.exc_info = None
        return record.levelno >= self.level


def _logger(*_: object) -> WrappedLogger:
    return logging.getLogger("relay")


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _final(style: LogFormat, output: TextIO) -> list[Processor]:
    on_terminal = output.isatty()
    match style:
        case LogFormat.CONSOLE:
            is_console = True
        case LogFormat.JSON:
            is_console = False
        case LogFormat.AUTO:
            is_console = on_terminal
    if is_console:
        return [
            without_passwords,
            _printable,
            structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=structlog.dev.plain_traceback),
        ]
    return [without_passwords, structlog.processors.JSONRenderer()]


def _with_our_name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Make the words of a library's line the reason of an event of ours."""
    library, _, _ = str(event["logger"]).partition(".")
    return {**event, "event": LIBRARIES.get(library, OTHER_LIBRARY), "reason": event["event"]}


def _without_addresses(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if "logger" in event:  # a library's
        for name in event.keys() & {"reason", "exception", "stack"}:
            event[name] = ADDRESS.sub("", str(event[name]))
    return event


def without_passwords(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Hide every known password, and the password of every URL.

    This is a second guard: the first rule is that no event holds a password.
    """
    for name, value in event.items():
        if name not in OURS and not (name == "event" and EVENT_NAME.fullmatch(str(value))):
            event[name] = _without_passwords(value)
    return event


def _without_passwords(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return scrub(value)
        case Mapping():
            return {key: _without_passwords(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_without_passwords(each) for each in value]
        case _:
            return scrub(repr(value))  # both renderers would show the `repr`, too


class _Shown:
    """A value that the console renderer shows as its `repr`, escaped."""

    def __init__(self, value: object) -> None:
        self._text = printable(repr(value))

    def __repr__(self) -> str:
        return self._text


def _printable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape the characters that a terminal acts on: reasons and exceptions hold text from other systems."""
    for name, value in event.items():
        if name in ("exception", "stack"):
            event[name] = printable_lines(str(value))
        elif isinstance(value, str):
            event[name] = value if value.isprintable() else _Shown(value)
        elif value is not None and not isinstance(value, int | float):
            event[name] = _Shown(value)
    return event
