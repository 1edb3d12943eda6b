"""The other relays: how many lanes each node is to hold, and who has fallen silent."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from relay.engine.session import LANES


class Peer(NamedTuple):
    """A relay whose session is there; the fields are the columns of `membership.MEMBERS`."""

    name: str
    pid: int  # of its session's server process
    heartbeat_at: datetime
    can_deliver: bool
    standby: bool


def share(name: str, members: Iterable[Peer]) -> int:
    """Tell how many lanes a node is to hold when these are all there are, itself among them.

    The shares differ by one at most. All lanes are shared by those who can deliver and do not stand by; if there is
    none, by the standbys that can deliver; if nobody can, they stay with whoever does not stand by.
    """
    serving = [member.name for member in _serving(list(members))]
    if name not in serving:
        return 0
    lanes, more = divmod(LANES, len(serving))
    return lanes + (sorted(serving).index(name) < more)


def _serving(members: Sequence[Peer]) -> Sequence[Peer]:
    able = [member for member in members if member.can_deliver]
    for group in (able, members):
        if active := [member for member in group if not member.standby]:
            return active
        if group:
            return group
    return ()


class Silence:
    """Notices who gives no heartbeat any more, by what we see ourselves: no clock but ours is asked.

    Args:
        timeout: seconds.
        gap: seconds between two looks, at most; after a longer one it was us who stood still, and all begins anew.
    """

    def __init__(self, timeout: float, gap: float) -> None:
        self._timeout = timeout
        self._gap = gap
        self._looked_at = 0.0
        self._since: dict[tuple[int, datetime], float] = {}  # a process and its last heartbeat -> first seen

    def look(self, peers: Iterable[Peer], now: float) -> list[Peer]:
        """Give those that have been silent for the time-out; `now` is monotonic."""
        before = self._since if now - self._looked_at <= self._gap else {}
        self._looked_at = now
        seen = {(peer.pid, peer.heartbeat_at): peer for peer in peers}
        self._since = {heartbeat: before.get(heartbeat, now) for heartbeat in seen}
        return [peer for heartbeat, peer in seen.items() if now - self._since[heartbeat] >= self._timeout]
