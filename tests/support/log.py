"""The log of this process, which commands set up for themselves."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def log_as_before() -> Iterator[None]:
    """Undo what a command changes in its process: the log, and how tracebacks are shown.

    Its log goes to what stderr was then, which a test has closed by its end.
    """
    root, ours, last = logging.getLogger(), logging.getLogger("relay"), logging.lastResort
    levels, handlers = (root.level, ours.level), root.handlers
    formatter = None if last is None else last.formatter
    hooks = (sys.excepthook, threading.excepthook)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers
        for logger, level in zip((root, ours), levels, strict=True):
            logger.setLevel(level)
        if last is not None:
            last.setFormatter(formatter)
        sys.excepthook, threading.excepthook = hooks
        structlog.reset_defaults()
