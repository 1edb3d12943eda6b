"""The log of this package: warnings and errors on stderr, until the application configures structlog or `logging`.

structlog by itself prints each event to stdout, debug included. A library must not. It must not be mute either: what it
gives up, an operator has to learn without a configuration.
"""

import logging
import sys
from traceback import format_tb
from types import TracebackType
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

LIBRARY = logging.getLogger("relay")


class _WithoutValues(logging.Formatter):
    """Shows of an exception where it was raised: its words may hold values of a message."""

    def formatException(  # noqa: N802  (the name of the standard library)
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "".join(format_tb(ei[2])).rstrip()


class _LastResort(logging.Handler):
    """Shows events on stderr as long as there is no other handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        if LIBRARY.handlers == [self] and not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


_last_resort = _LastResort(logging.WARNING)
_last_resort.setFormatter(_WithoutValues("%(levelname)s %(message)s"))
LIBRARY.addHandler(_last_resort)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger that follows the application's configuration at each event.

    Events go where structlog is configured to send them. Where it is not, they go to the logger `relay` of `logging`,
    as `event='consumer.ready' queue='invoices'`, or as `message.failed: ` and the event's `summary`.
    """
    return cast(FilteringBoundLogger, _Logger(name))


class _Logger:
    def __init__(self, name: str) -> None:
        self._configured = structlog.get_logger(name)
        self._library = structlog.wrap_logger(
            LIBRARY,
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[structlog.stdlib.filter_by_level, _as_record],
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._configured if structlog.is_configured() else self._library, method)


_key_values = structlog.processors.KeyValueRenderer(key_order=["event"])


def _as_record(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what `logging` is called with."""
    exc_info = event.pop("exc_info", None)
    line = f"{event['event']}: {event['summary']}" if "summary" in event else _key_values(logger, method, event)
    return (line,), {"exc_info": exc_info}
