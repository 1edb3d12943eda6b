"""The benchmark of a long run measures what it says: each row's wait, what is lost, and what grows."""

from pathlib import Path

import pytest

from bench import soak as soak_bench
from bench.frame import queue
from bench.frame.notes import NOTE, NoteReader
from bench.frame.servers import Servers
from bench.programs.taker import running_taker
from bench.soak import Ledger, Minute, Sample, Soaked, growths, soak


@pytest.mark.drills
def test_all_that_is_written_is_confirmed_and_taken(servers: Servers) -> None:
    """A soak of four seconds runs; its counts agree and nothing is lost."""
    told: list[Sample] = []

    soaked = soak(servers, rate=100, seconds=4, interval=0.5, span=2, tell=told.append)

    assert soaked.lost == 0
    assert soaked.written >= 400
    assert len(soaked.minutes) == 2
    assert sum(2 * minute.rate for minute in soaked.minutes) == soaked.written
    assert all(0 < minute.p50 <= minute.p99 for minute in soaked.minutes)
    assert soaked.samples == told
    assert all(min(sample.relay, sample.rabbitmq, sample.pending, sample.sent) > 0 for sample in told)
    assert queue.depth(servers.broker_url) == 0


def test_what_somebody_else_took_is_lost(servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak_bench, "ARRIVE_WITHIN", 5.0)
    stolen = tmp_path / "stolen"

    with running_taker(servers.broker_url, log=tmp_path / "thief.log", taken=stolen):
        soaked = soak(servers, rate=100, seconds=1, interval=0.5, span=1, tell=lambda _: None)

    committed = {id_ for file in servers.folder.glob("commits-*") for id_, _ in NoteReader(file).read()}
    assert soaked.lost == len(committed & {id_ for id_, _ in NoteReader(stolen).read()}) > 0


def test_a_row_is_missing_until_it_is_confirmed_and_taken(tmp_path: Path) -> None:
    commits, confirms, taken = (tmp_path / name for name in ("commits", "confirms", "taken"))
    ledger = Ledger([NoteReader(commits)], NoteReader(confirms), NoteReader(taken))

    note(commits, (1, 10.0), (2, 10.0), (3, 10.0))
    note(confirms, (1, 10.5), (2, 10.25))
    note(taken, (2, 11.0), (3, 11.0))
    ledger.read()

    assert ledger.confirmed == [(10.0, 10.5), (10.0, 10.25)]
    assert (ledger.written, ledger.missing) == (3, 2)


def test_what_is_read_before_its_commit_counts(tmp_path: Path) -> None:
    commits, confirms, taken = (tmp_path / name for name in ("commits", "confirms", "taken"))
    ledger = Ledger([NoteReader(commits)], NoteReader(confirms), NoteReader(taken))

    note(confirms, (1, 10.5))
    note(taken, (1, 11.0))
    ledger.read()
    note(commits, (1, 10.0))
    ledger.read()

    assert ledger.confirmed == [(10.0, 10.5)]
    assert ledger.missing == 0


def test_a_note_is_read_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    reader = NoteReader(file)
    whole = NOTE.pack(1, 10.0) + NOTE.pack(2, 11.0)

    reads = [reader.read()]
    for size in (20, len(whole)):
        file.write_bytes(whole[:size])
        reads.append(reader.read())

    assert reads == [[], [(1, 10.0)], [(2, 11.0)]]


def test_the_first_third_may_grow() -> None:
    compared = growths(run_of(relay=[50, 60, 80, 80, 80, 81], pending=[1, 20, 40, 40, 40, 44]), rate=100)

    assert all(one.is_flat for one in compared)


@pytest.mark.parametrize(
    ("relay", "pending", "grown"),
    [
        ([80, 80, 80, 80, 85, 85], [40] * 6, "relay's memory, MiB"),  # 5 MiB, which is more than 5 %
        ([200, 200, 200, 200, 206, 206], [40] * 6, "relay's memory, MiB"),  # 3 %, which is more than 5 MiB
        ([80] * 6, [40, 40, 40, 40, 49, 49], "pending rows, MiB"),
    ],
)
def test_what_grows_is_not_flat(relay: list[float], pending: list[float], grown: str) -> None:
    compared = growths(run_of(relay, pending), rate=100)

    assert [one.name for one in compared if not one.is_flat] == [grown]


def test_a_vacuum_may_come_late() -> None:
    pending = run_of(relay=[80] * 6, pending=[40, 40, 40, 40, 70, 70])

    compared = growths(pending, rate=2000)

    assert all(one.is_flat for one in compared)


def run_of(relay: list[float], pending: list[float]) -> Soaked:
    samples = [
        Sample(at=at, relay=mib, rabbitmq=100.0, pending=size, dead_rows=0, sent=1.0, in_flight=0)
        for at, (mib, size) in enumerate(zip(relay, pending, strict=True))
    ]
    return Soaked([Minute(rate=100.0, p50=4.0, p99=9.0, samples=[sample]) for sample in samples], 600, 0)


def note(file: Path, *notes: tuple[int, float]) -> None:
    with file.open("ab") as appended:
        appended.write(b"".join(NOTE.pack(*one) for one in notes))
