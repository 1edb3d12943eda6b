"""Who counts as silent, and when waiting messages count as stalled."""

from relay.runtime.silence import Silence, StallTimer


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


def test_messages_that_wait_while_none_settles_are_a_stall_after_its_time() -> None:
    timer = StallTimer(stall_after=5)
    timer.restart(100)

    assert timer.look(settled=0, waiting=1, now=105) is None
    assert timer.look(settled=0, waiting=1, now=106) == 6
    assert timer.look(settled=1, waiting=1, now=107) is None
    assert timer.look(settled=1, waiting=1, now=113) == 6


def test_the_time_without_a_waiting_message_does_not_count() -> None:
    timer = StallTimer(stall_after=5)
    timer.look(settled=0, waiting=0, now=100)

    assert timer.look(settled=0, waiting=1, now=104) is None
    assert timer.look(settled=0, waiting=1, now=106) == 6
