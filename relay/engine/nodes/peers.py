"""The other relays: how many lanes each node is to hold."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from relay.engine.session.session import LANES


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
