"""How the lanes are shared."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from relay.engine.nodes.membership import Peer, share

NOW = datetime(2026, 1, 1, tzinfo=UTC)

MEMBERS = st.lists(
    st.tuples(st.text("abcdef", min_size=1, max_size=3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=20,
    unique_by=lambda member: member[0],
).map(lambda members: [peer(*member) for member in members])


def peer(name: str, can_deliver: bool = True, standby: bool = False) -> Peer:
    return Peer(name, 1, NOW, can_deliver, standby)


@given(MEMBERS)
def test_every_lane_is_shared_and_evenly(members: list[Peer]) -> None:
    shares = {member.name: share(member.name, members) for member in members}

    assert sum(shares.values()) == 16
    serving = [lanes for lanes in shares.values() if lanes]
    assert max(serving) - min(serving) <= 1
    assert len(serving) == 16 or not [
        member for member in members if member.can_deliver and not member.standby and not shares[member.name]
    ]


@given(MEMBERS)
def test_lanes_go_to_those_who_can_deliver_and_then_to_those_who_do_not_stand_by(members: list[Peer]) -> None:
    best = max((member.can_deliver, not member.standby) for member in members)

    for member in members:
        if share(member.name, members):
            assert (member.can_deliver, not member.standby) == best


def test_a_standby_takes_over_from_a_node_that_cannot_deliver() -> None:
    members = [peer("a", can_deliver=False), peer("b", standby=True)]

    assert [share(name, members) for name in "ab"] == [0, 16]
