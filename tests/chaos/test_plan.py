"""A seed decides the faults, and the seeds of CI bring every kind."""

import re
from itertools import pairwise
from pathlib import Path

from tests.chaos import relay_faults, server_faults, writer_faults
from tests.chaos.fleet import NAMES
from tests.chaos.plan import draw
from tests.chaos.run import CALM_AFTER, CALM_BEFORE

STORM = 60 - CALM_BEFORE - CALM_AFTER
KINDS = {*relay_faults.KINDS, *server_faults.BROKER, *server_faults.DATABASE, *writer_faults.KINDS}


def test_the_same_seed_plans_the_same() -> None:
    assert draw(7, STORM, NAMES) == draw(7, STORM, NAMES)
    assert draw(7, STORM, NAMES) != draw(8, STORM, NAMES)


def test_faults_of_a_track_follow_each_other_and_those_of_others_overlap() -> None:
    tracks = draw(7, STORM, NAMES)

    assert all(one.at + one.seconds < then.at for track in tracks for one, then in pairwise(track))
    everything = [one for track in tracks for one in track]
    assert any(
        one.at < other.at < one.at + one.seconds
        for one in everything
        for other in everything
        if one.relay and other.relay and one.relay != other.relay
    )


def test_numbers_tell_the_faults_apart_in_the_order_of_their_beginning() -> None:
    planned = sorted((one for track in draw(7, STORM, NAMES) for one in track), key=lambda one: one.at)

    assert [one.number for one in planned] == list(range(1, len(planned) + 1))
    assert all(one.at < STORM for one in planned)


def test_the_seeds_of_verify_have_every_kind() -> None:
    found = re.search(r"for seed in ([\d ]+);", Path("Makefile").read_text())
    assert found

    seeds = [int(seed) for seed in found[1].split()]

    drawn = {one.kind for seed in seeds for track in draw(seed, STORM, NAMES) for one in track}
    assert drawn == KINDS
