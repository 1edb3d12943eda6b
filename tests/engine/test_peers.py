"""How the lanes are shared, and who counts as silent."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from relay.engine.peers import Peer, Silence, share

NOW = datetime(2026, 1, 1, tzinfo=UTC)

MEMBERS = st.lists(
    st.tuples(st.text("abcdef", min_size=1, max_size=3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=20,
    unique_by=lambda member: member[0],
).map(lambda members: [peer(*member) for member in members])


def peer(name: str, can_deliver: bool = True, standby: bool = False, *, pid: int = 1, age: float = 0) -> Peer:
    return Peer(name, pid, NOW - timedelta(seconds=age), can_deliver, standby)


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


def test_who_gives_no_heartbeat_is_silent_after_the_time_out() -> None:
    silence = Silence(timeout=10, gap=3)

    looks = [silence.look([peer("a", age=0), peer("b", pid=2, age=-now)], now) for now in range(12)]

    assert not any(looks[:10])
    assert [silent.name for silent in looks[10]] == ["a"]


def test_after_standing_still_ourselves_we_call_nobody_silent() -> None:
    silence = Silence(timeout=10, gap=3)
    for now in range(9):
        silence.look([peer("a")], now)

    assert not silence.look([peer("a")], 60)
    assert not silence.look([peer("a")], 62)


def test_no_clock_of_the_database_is_asked() -> None:
    assert not Silence(timeout=10, gap=3).look([peer("a", age=3600)], 0)
