"""What is worth waiting for: a database that is away for a moment, and a relay that is behind."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from adbc_driver_postgresql import dbapi

from outbox_spark.errors import BatchError
from outbox_spark.plan import Room

RECONNECT_FOR = 30.0  # seconds; a failover takes less
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0

log = logging.getLogger("outbox_spark")

Connection = TypeVar("Connection")


def patiently(connect: Callable[[], Connection], refused: type[Exception]) -> Connection:
    """Connect, again and again with growing pauses while that is refused, for as long as RECONNECT_FOR.

    Raises:
        the last refusal.
    """
    give_up_at = time.monotonic() + RECONNECT_FOR
    pause = FIRST_PAUSE
    while True:
        try:
            return connect()
        except refused:
            if time.monotonic() + pause > give_up_at:
                raise
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  # so that the tasks do not all come at once
        pause = min(2 * pause, LONGEST_PAUSE)


def connect_task(info: str) -> dbapi.Connection:
    """Connect a task, in autocommit: ADBC would begin a transaction of its own for each ingest."""
    return patiently(lambda: dbapi.connect(info, autocommit=True), dbapi.OperationalError)


def wait_for_room(room: Room, count: Callable[[str], int]) -> None:
    """Return once no more than `room.most` rows are pending. No transaction may be open: it would hold up the relay.

    Raises:
        BatchError: there were more for as long as `room.wait`.
    """
    give_up_at = time.monotonic() + room.wait
    pause = FIRST_PAUSE
    while count(room.count) > room.most:
        if time.monotonic() > give_up_at:
            raise BatchError(
                f"more than {room.most} rows (maxPending) have been pending for {room.wait} s (maxPendingWait), and "
                "nothing more was written: look with `relay status` why, and run the batch again"
            )
        log.warning("outbox: more than %s rows are pending: the write waits", room.most)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
