"""Rows that wait in the table for a route that does not work, or is paused.

No queue is bound for a routing key, an exchange is missing or forbidden, or a queue has taken no message for long. The
address is at fault, not the row, so rows for such an address lose no attempt. They wait in a separate partition, where
they delay no other row. From time to time the relay sends one of them as a probe, alone on a channel.
Once the broker takes the probe, the other rows follow in order, and then those of other routes of its exchange
(`release.py`).
An operator can pause a route: its rows wait in the same way, and the relay sends no probe before it is resumed.
If a row that is put away holds its key (`DeliveryPolicy`), the later rows of the key wait with it, whatever their
address.

Order. Rows of one key may wait for several routes, and the routes leave in any order. What keeps the order is that no
row is offered while an earlier row of its key is in quarantine:

- Rows come back only between two windows, when no read has begun and every row that was read is offered. The tail then
  reads from the first of them, so the rows of a key come by their ids.
- A row that was read goes behind the earlier row of its key (`find_behind`), and comes back after it.
- A row that the broker returns takes along the rows that wait behind it in the queue (`_close_routes`).
- A probe is the first row of its key, and no row of that key is in flight or backs off.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import assert_never

from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.gate import Gate, QuarantinedRoute
from relay.engine.read.tail import Tail, first_ids
from relay.engine.row import Address, Fault, Place, Row, pieces
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession, Retry
from relay.engine.settle.put_away import ClosedError, PutAway
from relay.engine.settle.quarantine_table import Left, QuarantineEntry, QuarantineTable, names
from relay.engine.settle.release import Agenda, Trust
from relay.logger import get_logger
from relay.runtime.backoff import backoff

log = get_logger(__name__)

PROBE_INITIAL, PROBE_MAX = 0.5, 5.0  # seconds between two probes of one route
PROBES_A_SECOND = 20  # for all routes together; each probe costs the database three transactions
LOAD_INTERVAL = 5.0  # seconds between two reads of the routes in the table, while there are routes
LOADED_A_SECOND = 1000  # routes; the loop stands still for 3 us a route, while each is read
PROBES_AMID_ENTRY = 2  # a second, while routes come: with 20, thousands come half as fast, and rows behind them wait
ENTRY_ENDS_AFTER = 1.0  # seconds without a new route
PROBES_AT_A_TIME = 4  # between two windows: other rows go on while thousands of routes are due
ROWS_PER_RELEASE = 1000
LOG_INTERVAL = 1.0  # seconds between two lines about routes that come, and between two about routes that go


class Quarantine:
    """The routes in quarantine, and the rows' way in and out, for the lanes of one session.

    Attributes:
        door: the way of rows into the partition of quarantined rows, and out of it; its `run` must run.
    """

    def __init__(
        self,
        session: LaneSession,
        tail: Tail,
        gate: Gate,
        sender: Sender,
        *,
        policy: DeliveryPolicy,
        retry: Retry,
    ) -> None:
        self._session = session
        self.door = PutAway(session, tail, retry)
        self._table = QuarantineTable(session, retry, self.door)
        self._tail = tail
        self._sender = sender
        self._address_of = gate.address_of
        self._holding = policy.put_away_holds_key
        self._gate = gate
        self._routes = gate.routes
        self._probes: dict[Place, Address] = {}  # under way
        self._to_probe = Agenda()  # in loop time, as the next
        self._to_release = Agenda()  # routes that work
        self._trust = Trust()
        self._probed_until = 0.0  # loop time at which the probes so far have taken their time
        self._entered_at = -ENTRY_ENDS_AFTER  # loop time at which a route has come last
        self._come = Lines(lambda **words: log.warning("route.quarantined", **words))
        self._gone = Lines(lambda **words: log.info("route.released", **words))
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._load_at = 0.0  # loop time
        session.on_routes_changed(self._load_soon)
        self._turn = gate.turn

    async def load(self) -> None:
        """Read from the table which routes are in quarantine.

        The relay probes a new route at once. It does so, too, if a route's count of probes has fallen, or its pause has
        ended: an operator has asked for that.
        """
        async with self._turn:
            await self._load()
        self._arm()

    async def _load(self) -> None:
        entries = dict(await self._table.routes())
        self._load_at = self._loop.time() + max(LOAD_INTERVAL, len(entries) / LOADED_A_SECOND)
        paused: dict[Address, str] = {}
        for address, entry in entries.items():
            if (route := self._routes.get(address)) is None:
                route = self._routes[address] = QuarantinedRoute(entry.id, entry.reason, entry.probes)
                self._to_probe.put(address, 0.0)
            route.id = entry.id  # a new one if the other nodes have released the route and quarantined it again
            if entry.probes < route.probes:
                route.probes = entry.probes
                self._hurry(address, route)
            if entry.is_paused:
                if not route.is_paused:
                    log.info("route.paused", **names(address), reason=entry.reason)
                route.reason = paused[address] = entry.reason
                self._pause(address, route)
        if paused:  # with each load: a row in flight at the pause may have been refused since, to be sent again
            await self._close_routes([], paused)
        for address, route in self._routes.items():
            if route.is_paused and address not in paused:
                log.info("route.resumed", **names(address))
                self._resume(address, route)

    def _load_soon(self) -> None:
        self._load_at = 0.0
        self._tail.interrupt()

    @property
    def is_outdated(self) -> bool:
        """Whether an operator has changed a route since the last `load`, perhaps before these rows were written."""
        return not self._load_at

    async def set_aside(self, rows: Sequence[Row]) -> None:
        """Put rows into quarantine whose addresses are there; the caller has the gate's `turn`."""
        addresses = {self._address_of(row) for row in rows}
        await self._set_aside(rows, {address: self._routes[address].reason for address in addresses})

    def send_alone(self, row: Row) -> None:
        """Send a row alone on a channel, as a probe; the caller offers the row next."""
        self._sender.queue.send_alone(row.id)

    async def close_routes(self, faults: Sequence[Fault]) -> None:
        """Put the addresses of these rows into quarantine, with all rows for these addresses that were not sent."""
        reasons = {self._address_of(fault.row): fault.reason for fault in reversed(faults)}  # the first of each
        rows = [fault.row for fault in faults]
        self._trust.note_returned(rows)
        async with self._turn:
            await self._close_routes(rows, reasons)

    async def _close_routes(self, returned: Sequence[Row], reasons: Mapping[Address, str]) -> None:
        """Set aside these rows, and all rows for these addresses that wait to be sent."""
        queue = self._sender.queue

        def is_bound_there(row: Row) -> bool:
            return self._address_of(row) in reasons

        withdrawn = queue.withdraw(is_bound_there)
        heads, waiting = [*returned, *withdrawn.heads], withdrawn.waiting
        if not heads and not waiting:
            return
        await self._set_aside([*heads, *filter(is_bound_there, waiting)], reasons)
        if not self._holding:
            for row in heads:
                queue.release_key(row)
            return
        # These rows are in the table now, and `find_behind` finds their keys there. Or they were put back, and the tail
        # makes their keys wait.
        followers = [row for row in waiting if not is_bound_there(row)]
        for row in heads:
            followers += queue.remove_followers(row)
        self._sender.offer(self._gate.free_now(await self.set_aside_followers(followers)))

    async def put_probe_back(self, row: Row) -> bool:
        """If this row, which is itself at fault, was a probe, put it back into quarantine; return whether it was.

        Such a failure says nothing about the route. The relay tries another row at once. It tries this row again only
        when no other row waits.
        """
        if (address := self.end_probe(row, at_once=row.attempts == 1)) is None:
            return False
        reason = self._routes[address].reason  # read before the wait: the route may be released meanwhile
        async with self._turn:
            await self._table.note_failure(row)
            await self._close_routes([row], {address: reason})
        return True

    def end_probe(self, row: Row, *, at_once: bool = True) -> Address | None:
        """If a row is the probe of a route, end the probe without a result; return the route's address.

        Args:
            at_once: whether to send the next probe at once.
        """
        if (address := self._probes.get((row.lane, row.id))) is None:
            return None
        route = self._routes[address]
        self._set_probe(address, route, None)
        if at_once:
            self._hurry(address, route)
            self._arm()
        return address

    def note_sent(self, rows: Iterable[Row]) -> None:
        """Note that these rows are marked, or discarded: a route whose probe is among them works again."""
        if not self._routes:
            return
        if self._trust.note_sent(rows):
            self._arm()
        for row in rows if self._probes else ():
            if (address := self._probes.get((row.lane, row.id))) is not None:
                route = self._routes[address]
                self._set_probe(address, route, None)
                # A row that waited only behind another row of its key says nothing about that row's route.
                route.works = self._address_of(row) == address and not route.is_paused
                if route.works:
                    self._trust.begin(address)
                self._hurry(address, route)
                self._arm()

    async def tend(self) -> None:
        """Send the probes that are due, and release the rows whose route works.

        Call it between two windows, when every row that was read is offered. The tail then reads a row that comes back
        before all later rows of its key.
        """
        now = self._loop.time()
        if now >= self._load_at and (self._routes or self.is_outdated):
            await self.load()
        if self._routes:
            async with self._turn:
                await self._release_due(now)
                await self._send_probes(now)
        self._tail.go_on()  # the work of any interrupt until now is done, or the timer is armed for it
        if self._routes:
            self._arm()  # also when no probe was due: the loop counts milliseconds, so a timer may fire a bit early

    async def _release_due(self, now: float) -> None:
        """Let rows go: of the routes that work, and of those that go on trust."""
        due = self._to_release.take(now, ROWS_PER_RELEASE)
        if not self._session.lanes.held:
            self._trust.clear()
        try:
            if due and self._session.lanes.held:
                await self._let_go(due, self._hurry)
                due.clear()
            if self._trust.next_at <= now:
                may_go = {address: not (route.is_paused or route.works) for address, route in self._routes.items()}
                if chosen := self._trust.next_round(now, may_go):
                    self._trust.go(chosen, await self._let_go(chosen, self._let_pass), now)
        except ClosedError:
            self._trust.clear()
        for address in due:
            self._schedule(address, self._routes[address])

    async def _send_probes(self, now: float) -> None:
        self._probed_until = max(self._probed_until, now - PROBES_AT_A_TIME / PROBES_A_SECOND)
        most = round((now - self._probed_until) * PROBES_A_SECOND)
        is_entry = now - self._entered_at < ENTRY_ENDS_AFTER
        for address in self._to_probe.take(now, min(most, 1) if is_entry else most):
            self._probed_until += 1 / (PROBES_AMID_ENTRY if is_entry else PROBES_A_SECOND)
            route = self._routes[address]
            try:
                if self._session.lanes.held:
                    await self._probe(address, route)
                    continue
            except ClosedError:
                pass
            self._schedule(address, route)

    async def _set_aside(self, rows: Sequence[Row], reasons: Mapping[Address, str]) -> None:
        """Let rows wait for their routes, for these reasons."""
        new: list[Address] = []
        for piece in pieces(rows, (row.cost for row in rows)):
            addresses = [self._address_of(row) for row in piece]
            own = {address: reasons[address] for address in addresses}
            try:
                entries = await self._table.set_aside(piece, addresses, own)
            except ClosedError:
                self.door.put_back(piece)
                continue
            self._tail.forget(piece)
            aside = {(row.lane, row.id) for row in piece}
            for address, entry in entries.items():
                if address not in self._routes:
                    self._routes[address] = QuarantinedRoute(entry.id, entry.reason, entry.probes)
                    self._schedule(address, self._routes[address])
                    new.append(address)
                self._update(address, self._routes[address], entry, aside)
        if new:
            self._entered_at = self._loop.time()
            self._come.write([names(address) | {"reason": reasons[address]} for address in new])
            self._arm()

    def _update(
        self, address: Address, route: QuarantinedRoute, entry: QuarantineEntry, aside: Container[Place]
    ) -> None:
        """Note that rows wait for a route once more."""
        if route.probe in aside:
            self._set_probe(address, route, None)
        route.id, route.reason = entry.id, entry.reason
        if route.works:
            route.works = False
            self._schedule(address, route)
        if entry.is_paused:
            self._pause(address, route)
        elif route.is_paused:
            self._resume(address, route)

    async def set_aside_followers(self, rows: list[Row]) -> list[Row]:
        """Set aside the rows whose key has an earlier row in quarantine, and return the others."""
        if not self._holding or not rows:
            return rows
        found = await self._table.find_behind(rows)
        if not found:
            return rows
        followers = [row for row in rows if row.id in found]
        try:
            behind = await self._table.set_aside_behind(followers)
        except ClosedError:
            self.door.put_back(followers)
            behind = found
        else:
            self._tail.forget([row for row in followers if row.id in behind])
        return [row for row in rows if row.id not in behind]

    async def _probe(self, address: Address, route: QuarantinedRoute) -> None:
        waiting = self._tail.backing_off.keys()
        if route.probe is not None and await self._table.is_on_its_way(route.probe, but=waiting):
            self._schedule(address, route)  # it is still under way: refused for now, or the broker is unreachable
            return
        last = route.probes % 2 == 1
        probe = await self._table.take_probe(route.id, but=waiting, holding=self._holding, last=last)
        self._set_probe(address, route, probe)
        if probe is None:
            await self._let_go([address], self._hurry)  # no row waits for the route
            return
        route.probes += 1
        self._schedule(address, route)
        self._go_back([probe])
        log.debug("route.probed", **names(address), probes=route.probes)

    async def _let_go(
        self, addresses: Sequence[Address], go_on: Callable[[Address, QuarantinedRoute], None]
    ) -> list[Place]:
        """Let rows of these routes go, and return them.

        Args:
            go_on: makes a route due that has more rows.
        Raises:
            ClosedError: no row can leave the quarantine for now.
        """
        routes = {self._routes[address].id: (address, self._routes[address]) for address in addresses}
        rows, left = await self._table.let_go(list(routes), ROWS_PER_RELEASE)
        self._go_back(rows)
        gone: list[Mapping[str, object]] = []
        for id_, (address, route) in routes.items():
            match left[id_]:
                case Left.ROWS:
                    go_on(address, route)
                case Left.PAUSE:
                    self._pause(address, route)
                case Left.OTHER_LANES:
                    # Those of a paused lane may wait for days. Meanwhile ours go out, unless one of them comes back.
                    route.works = True
                    self._schedule(address, route)
                case Left.NOTHING:
                    self._set_probe(address, route, None)
                    self._to_probe.drop(address)
                    self._to_release.drop(address)
                    del self._routes[address]
                    gone.append(names(address) | {"probes": route.probes})
                case _:
                    assert_never(left[id_])
        if gone:
            self._gone.write(gone)
            if not self._routes:  # an operator may have sent rows to a new route; later rows must not overtake
                await self._load()
        return rows

    def _go_back(self, rows: Iterable[Place]) -> None:
        for lane, id_ in first_ids(rows).items():
            self._tail.reread_from(lane, id_ - 1)

    def _set_probe(self, address: Address, route: QuarantinedRoute, probe: Place | None) -> None:
        if route.probe is not None:
            self._probes.pop(route.probe, None)
        route.probe = probe
        if probe is not None:
            self._probes[probe] = address

    def _pause(self, address: Address, route: QuarantinedRoute) -> None:
        route.is_paused, route.works = True, False
        self._to_probe.drop(address)
        self._to_release.drop(address)

    def _resume(self, address: Address, route: QuarantinedRoute) -> None:
        route.is_paused = False
        self._hurry(address, route)

    def _hurry(self, address: Address, route: QuarantinedRoute) -> None:
        self._plan(address, route, 0.0)

    def _let_pass(self, address: Address, route: QuarantinedRoute) -> None:
        """Let the rows of a route pass that goes on trust; its other rows follow, unless one of these comes back."""
        route.works = True
        self._schedule(address, route)

    def _schedule(self, address: Address, route: QuarantinedRoute) -> None:
        most = max(PROBE_MAX, len(self._routes) / PROBES_A_SECOND)
        self._plan(address, route, self._loop.time() + backoff(route.probes + 1, PROBE_INITIAL, most))

    def _plan(self, address: Address, route: QuarantinedRoute, at: float) -> None:
        if route.is_paused:
            return
        due, other = (self._to_release, self._to_probe) if route.works else (self._to_probe, self._to_release)
        due.put(address, at)
        other.drop(address)

    def _arm(self) -> None:
        """Interrupt the tail when the next probe or release is due, or when the table must be read again."""
        if self._timer is not None:
            self._timer.cancel()
        probe_at = max(self._to_probe.next_at, self._probed_until + 1 / PROBES_A_SECOND)
        at = min(probe_at, self._to_release.next_at, self._trust.next_at, self._load_at)
        self._timer = self._loop.call_at(at, self._tail.interrupt) if self._routes else None


class Lines:
    """Log lines about routes: the first at once, then one in `LOG_INTERVAL` that says how many `more` there are."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._waiting: list[Mapping[str, object]] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Log these lines, or count them for the next line."""
        self._waiting += lines
        if self._timer is None:
            self._write()

    def _write(self) -> None:
        self._timer = None
        if self._waiting:
            first, *others = self._waiting
            self._log(**first, **({"more": len(others)} if others else {}))
            self._waiting.clear()
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL, self._write)
