"""The log of this package: silent until the application configures structlog or the standard library's logging.

structlog by itself prints each event to stdout, debug included. A library must not.
"""

import logging
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

LIBRARY = logging.getLogger("relay")
LIBRARY.addHandler(logging.NullHandler())  # else logging prints warnings to stderr where nothing is configured


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger that follows the application's configuration at each event.

    Events go where structlog is configured to send them. Where it is not, they go to the logger `relay` of `logging`,
    as `event='consumer.ready' queue='invoices'`.
    """
    return cast(FilteringBoundLogger, _Logger(name))


class _Logger:
    def __init__(self, name: str) -> None:
        self._configured = structlog.get_logger(name)
        self._library = structlog.wrap_logger(
            LIBRARY,
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._configured if structlog.is_configured() else self._library, method)
