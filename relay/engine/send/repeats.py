"""Rows that the broker returns although their route works: a deduplicating exchange knows them already.

Such an exchange drops a repeat, and the broker then returns it with the words for a missing binding. When a connection
was cut in a backlog, thousands of repeats came back, and the route went to quarantine with all other rows. So a repeat
that is returned waits, and holds up its key only, while the broker takes other rows for the address.
It is not marked as sent: nothing shows that the exchange has dropped it, and the first try may have been lost.
"""

import asyncio
from collections.abc import Iterable

from relay.engine.row import Address, Row
from relay.engine.send.routes import Router

LASTING_AFTER = 5.0  # seconds without a confirm, after which the address is at fault
REMEMBERED = 50_000  # rows


class Repeats:
    """The rows that were returned, and the addresses of returned repeats. True while such an address is known."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._returned: dict[int, None] = {}  # ids, the oldest first: an earlier process may have sent them
        self._since: dict[Address, float] = {}  # the first returned repeat since the last confirm

    def __bool__(self) -> bool:
        return bool(self._since)

    def steps_aside(self, row: Row, address: Address, *, is_repeat: bool) -> bool:
        """Whether a returned row says nothing about its address for now."""
        if not is_repeat and row.id not in self._returned:
            self._returned[row.id] = None
            if len(self._returned) > REMEMBERED:
                del self._returned[next(iter(self._returned))]
            return False
        if self._clock() - self._since.setdefault(address, self._clock()) < LASTING_AFTER:
            return True
        del self._since[address]
        return False

    def note_confirmed(self, rows: Iterable[Row], router: Router) -> None:
        """Note that the addresses of these rows work."""
        for row in rows:
            self._since.pop(router.address(row), None)
            self._returned.pop(row.id, None)
