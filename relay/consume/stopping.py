"""How the parts of a consumer learn that it stops: a wait that can have no result any more raises `Stopping`."""

import asyncio


class Stopping(Exception):  # noqa: N818  (nothing went wrong)
    """The consumer stops, and what was waited for did not happen. Its tasks end; no code outside of it sees this."""


def raise_if_set(stopping: asyncio.Event) -> None:
    """Raise Stopping once the consumer was told to stop."""
    if stopping.is_set():
        raise Stopping
