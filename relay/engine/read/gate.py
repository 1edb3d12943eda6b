"""May this row go now? The one place that answers, for each row between the table and the broker.

A row that was read goes to the sender, unless one of these keeps it in the table. `Gate` asks in this order:

1. Its key has a parked row (`ParkedKeys`): the row is parked behind it.
2. Its address is in quarantine, as it does not work or an operator has paused it: the row is put into quarantine. Only
   the probe of an address that does not work passes.
3. An earlier row of its key is in quarantine: the row follows it there.
4. It backs off, or its key waits for a row that does (`tail.BackingOff`): the row is left to the table until then.
5. Its lane leaves this node, as another node takes it or an operator has paused it: the row is left to the table.
6. Rows of its key that come before it were left to the table since it was read: they are read again together.

The sender asks two more questions about the rows that it gets:

7. Was the row confirmed in an earlier session, and perhaps not marked (`Unmarked`)? Then it is marked, and not sent.
8. Is another row of its key under way (`KeysUnderWay`)? Then the row waits in memory until that one is settled.

While the broker refuses rows, the sender also waits for its answers (`exchange_checks.py`, `backpressure.py`).
A row that is under way is not read again (`positions.py`).
What moves rows in the table, in `settle`, notes here what is closed and what is open again.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.tail import Tail
from relay.engine.row import Address, Key, Place, Row, key_of
from relay.engine.session.session import HeldLanes

REMEMBERED = 50_000  # rows; a window has far fewer


class ParksBehind(Protocol):
    """Parks rows in the table."""

    async def park_behind(self, rows: Sequence[Row]) -> None:
        """Park rows behind the parked row of their key."""


class SetsAside(Protocol):
    """Puts rows into quarantine in the table."""

    @property
    def is_outdated(self) -> bool:
        """Whether an operator has changed a route since the last `load`, perhaps before these rows were written."""

    async def load(self) -> None:
        """Read from the table which routes are in quarantine. It takes the gate's `turn`; below, the caller has it."""

    async def set_aside(self, rows: Sequence[Row]) -> None:
        """Put rows into quarantine whose addresses are there."""

    async def set_aside_followers(self, rows: list[Row]) -> list[Row]:
        """Put the rows into quarantine whose key has an earlier row there, and return the others."""

    def send_alone(self, row: Row) -> None:
        """Make a row go out alone on a channel, as a probe."""


class Gate:
    """What keeps the rows of one session's lanes from going, and which may go.

    Attributes:
        address_of: returns the address of a row.
        parked: the keys that have a parked row.
        routes: the addresses in quarantine.
        turn: taken while rows enter or leave the quarantine. Rows must not enter while rows of their key leave, and no
            row may pass meanwhile.
    """

    def __init__(self, tail: Tail, lanes: HeldLanes, address_of: Callable[[Row], Address]) -> None:
        self._tail = tail
        self._lanes = lanes
        self.address_of = address_of
        self.parked = ParkedKeys()
        self.routes: dict[Address, QuarantinedRoute] = {}
        self.turn = asyncio.Lock()

    async def admit(self, window: list[Row], parking: ParksBehind, quarantine: SetsAside) -> list[Row]:
        """Return the rows of a window that may go now; the others are put away, or left to the table.

        The caller offers them at once: later a key may begin to wait, or a lane to leave.
        """
        rows = window
        while True:
            behind, rows = self.parked.split(rows)
            if behind:
                await parking.park_behind(behind)
            if quarantine.is_outdated:
                await quarantine.load()
            if self.routes or self.turn.locked():
                async with self.turn:
                    closed, rows = self._split_by_route(rows, quarantine)
                    await quarantine.set_aside(closed)
                    rows = await quarantine.set_aside_followers(rows)
            if not self.parked.has_added(rows):  # otherwise a row was parked while the table was asked
                return self.free_now(rows)

    def _split_by_route(self, rows: Iterable[Row], quarantine: SetsAside) -> tuple[list[Row], list[Row]]:
        """Split rows into those whose route is closed for them, and the others."""
        closed: list[Row] = []
        free: list[Row] = []
        for row in rows:
            route = self.routes.get(self.address_of(row))
            if route is None or route.works:
                free.append(row)
            elif route.probe == (row.lane, row.id) and not route.is_paused:
                quarantine.send_alone(row)
                free.append(row)
            else:
                closed.append(row)
        return closed, free

    def free_now(self, rows: list[Row]) -> list[Row]:
        """Return the rows that may be sent at this moment; the others are left to the table.

        The caller offers them at once, see `admit`.
        """
        tail = self._tail
        waiting, free = tail.backing_off.split(rows, tail.read_at)
        if waiting:
            tail.forget(waiting)
        if leaving := self._lanes.leaving:
            tail.hand_back([row for row in free if row.lane in leaving])
            free = [row for row in free if row.lane not in leaving]
        if tail.left_keys and (later := [row for row in free if row.key in tail.left_keys]):
            # Rows of their keys come before them.
            tail.read_again(later)
            free = [row for row in free if row.key not in tail.left_keys]
        return free


class ParkedKeys:
    """The keys that have a parked row; the relay parks their later rows as they come.

    The table decides; what is in memory of the keys only spares a query for all other keys.
    Of each key only the hash is kept, 8 bytes, as there may be millions. Python salts its hashes in each process, so no
    writer can choose two keys of one hash.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, array[int]] = {}  # lane -> hashes of its keys, in order; no lane without a key
        self._added: set[Key | None] = set()  # since the last `split`

    def replace(self, lane: int, hashes: Iterable[int]) -> None:
        """Take these for the hashes of all keys of a lane that have a parked row."""
        self._hashes.pop(lane, None)
        if in_order := array("q", sorted(set(hashes))):
            self._hashes[lane] = in_order

    def add(self, row: Row) -> None:
        """Note that this row is parked; the later rows of its key wait."""
        self._added.add(row.key)
        hashes = self._hashes.setdefault(row.lane, array("q"))
        place, found = _find(hashes, row)
        if not found:
            hashes.insert(place, hash(key_of(row)))

    def remove(self, row: Row) -> None:
        """Note that the key of this row has no parked row any more."""
        hashes = self._hashes.get(row.lane, array("q"))
        place, found = _find(hashes, row)
        if found:
            del hashes[place]
        if not hashes:
            self._hashes.pop(row.lane, None)

    def has_added(self, rows: Iterable[Row]) -> bool:
        """Whether the key of one of these rows has a parked row since the last `split`."""
        return bool(self._added) and any(row.key in self._added for row in rows)

    def split(self, window: list[Row]) -> tuple[list[Row], list[Row]]:
        """Split rows into those whose key has a parked row, and the others."""
        self._added.clear()
        if not self._hashes:
            return [], window
        behind: list[Row] = []
        free: list[Row] = []
        for row in window:
            hashes = self._hashes.get(row.lane)
            (behind if hashes and _find(hashes, row)[1] else free).append(row)
        return behind, free


def _find(hashes: "array[int]", row: Row) -> tuple[int, bool]:
    """Return where the hash of a row's key is among these, or belongs, and whether it is there."""
    wanted = hash(key_of(row))
    place = bisect_left(hashes, wanted)
    return place, place < len(hashes) and hashes[place] == wanted


@dataclass(slots=True)
class QuarantinedRoute:
    """An address in quarantine."""

    id: int
    reason: str
    probes: int  # since the route came into quarantine
    is_paused: bool = False  # no probe, and no row is let go
    probe: Place | None = None  # the row that is under way as a probe
    works: bool = False  # the broker took a probe, or all of ours have gone: the relay releases the rows


class KeysUnderWay:
    """The keys of which a row is under way, each with the rows that wait in memory behind it.

    One at a time, that is each key with a row between here and its mark. Otherwise it is a key of which a row was
    refused before it was sent.
    """

    def __init__(self, policy: DeliveryPolicy) -> None:
        self._policy = policy
        self._by_key = policy.one_at_a_time
        self._behind: dict[Key, list[Row] | None] = {}  # the rows that wait; None where no row does

    def heads(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Return the rows that may go now; each of the others waits behind the row of its key that is under way."""
        keys = self._behind
        if not self._by_key and not keys:
            return list(rows)
        heads: list[Row] = []
        for row in rows:
            if (key := key_of(row))[1] is not None:
                if key in keys:
                    waiting = keys[key]
                    if waiting is None:
                        keys[key] = [row]
                    else:
                        waiting.append(row)
                    continue
                if self._by_key:
                    keys[key] = None
            heads.append(row)
        return heads

    def confirm(self, rows: Iterable[Row], ready: deque[Row]) -> None:
        """Move the next row of each key of confirmed rows to `ready`, as it may go now."""
        if self._by_key:
            keys = self._behind
            for key in map(key_of, rows):
                waiting = keys.pop(key, None)
                if waiting is not None:
                    # To the front: otherwise a long queue behind one key would finish last, one row at a time.
                    ready.appendleft(waiting.pop(0))
                    keys[key] = waiting or None

    def release_key(self, row: Row) -> Row | None:
        """Let the key of a faulty row go on without it; return the next row of the key, if there is one."""
        if self._by_key and (key := row.key) is not None and (waiting := self._behind.pop(key)) is not None:
            following = waiting.pop(0)
            self._behind[key] = waiting or None
            return following
        return None

    def add_behind(self, behind: dict[Key, list[Row]]) -> None:
        """Let these rows wait, by key (pipelined), as a row of each key was refused before it was sent."""
        for key, rows in behind.items():
            self._behind[key] = [*(self._behind.get(key) or ()), *rows]

    def remove_followers(self, row: Row) -> list[Row]:
        """Forget the key of a faulty row; remove and return the rows behind it, in order."""
        waiting = None if row.key is None else self._behind.pop(row.key, None)
        return waiting or []

    def withdraw(self, matches: Callable[[Row], bool]) -> list[Row]:
        """Remove and return the waiting rows that match, with those behind them if what is put away holds its key."""
        found: list[Row] = []
        for key, waiting in self._behind.items():
            first = next((n for n, row in enumerate(waiting or ()) if matches(row)), None)
            if waiting is None or first is None:
                continue
            if self._policy.put_away_holds_key:
                found += waiting[first:]
                self._behind[key] = waiting[:first] or None
            else:
                found += [row for row in waiting if matches(row)]
                self._behind[key] = [row for row in waiting if not matches(row)] or None
        return found

    def clear(self) -> None:
        """Forget every key and row."""
        self._behind.clear()


class Unmarked:
    """Rows that were confirmed and perhaps not marked. When they are read again, they are marked and not sent."""

    def __init__(self) -> None:
        self._message_ids: dict[int, bytes] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self._message_ids)

    def remember(self, rows: Iterable[Row]) -> None:
        """Remember these rows as well; some earlier ones may not have been read again yet."""
        self._message_ids |= {row.id: row.message_id for row in rows}
        for id_ in list(self._message_ids)[:-REMEMBERED]:  # the oldest: marked rows are never read again
            del self._message_ids[id_]

    def part(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Split the rows into those already confirmed, which are forgotten, and the rest."""
        confirmed: list[Row] = []
        others: list[Row] = []
        for row in rows:
            known = self._message_ids.pop(row.id, None) == row.message_id
            (confirmed if known else others).append(row)
        return confirmed, others
