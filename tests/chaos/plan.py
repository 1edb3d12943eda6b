"""The faults that a seed decides, on several tracks: tracks overlap, and on each track one fault follows the other."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.chaos import relay_faults, server_faults, writer_faults
from tests.chaos.kinds import FaultKind, Planned

BETWEEN = (0.5, 3.0)  # seconds from one fault of a track to the next
BETWEEN_RESTARTS = (3.0, 9.0)  # the database has few faults, and each hits everyone

Track = list[Planned]


def draw(seed: int, seconds: float, relays: Sequence[str]) -> list[Track]:
    """Return faults for `seconds`, track by track.

    Kinds come from shuffled decks, one for all relays together: none comes again before all others have come.
    """
    chance = Random(seed)
    of_relays = _deck(chance, relay_faults.KINDS)
    tracks = [_track(chance, of_relays, seconds, relay, BETWEEN) for relay in relays]
    tracks += [
        _track(chance, _deck(chance, server_faults.BROKER), seconds, "", BETWEEN),
        _track(chance, _deck(chance, server_faults.DATABASE), seconds, "", BETWEEN_RESTARTS),
        _track(chance, _deck(chance, writer_faults.KINDS), seconds, "", BETWEEN),
    ]
    in_order = sorted((one for track in tracks for one in track), key=lambda one: one.at)
    numbers = {one.seed: number for number, one in enumerate(in_order, start=1)}
    return [[replace(one, number=numbers[one.seed]) for one in track] for track in tracks]


def _track(chance: Random, kinds: Iterator[FaultKind], until: float, relay: str, between: tuple[float, float]) -> Track:
    track: Track = []
    at = chance.uniform(0, between[1])
    while at < until:
        kind = next(kinds)
        seconds = min(chance.uniform(*kind.seconds), max(kind.seconds[0], until - at))
        track.append(Planned(0, at, kind, relay, seconds, chance.getrandbits(64)))
        at += seconds + chance.uniform(*between)
    return track


def _deck(chance: Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    while True:
        yield from chance.sample(kinds, len(kinds))
