"""Who counts as silent."""

from relay.silence import Silence


def test_who_gives_no_heartbeat_is_silent_after_the_time_out() -> None:
    silence: Silence = Silence(timeout=10, gap=3)

    looks = [silence.look({("a", 0): "a", ("b", now): "b"}, now) for now in range(12)]

    assert not any(looks[:10])
    assert looks[10] == ["a"]


def test_after_standing_still_ourselves_we_call_nobody_silent() -> None:
    silence: Silence = Silence(timeout=10, gap=3)
    for now in range(9):
        silence.look({"beat": "a"}, now)

    assert not silence.look({"beat": "a"}, 60)
    assert not silence.look({"beat": "a"}, 62)
