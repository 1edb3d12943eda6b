"""A batch run again, after runs that were killed, with the same rows or others: once in the tables, or refused.

A model that knows of pieces and of one transaction says what must be there; SQL counts what is. The functions
are those that Spark calls for each partition and for the commit.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DecimalType, StringType, StructType

from outbox_spark import BatchError
from outbox_spark.load import load
from outbox_spark.pieces import Checksum, write_piece
from outbox_spark.plan import Save, Staged
from outbox_spark.prepare import prepare, prepare_stream
from outbox_spark.source import Attempt, OutboxStreamWriter, OutboxWriter, StreamAttempt
from tests.spark.frames import staging_tables

Row = tuple[str | None, int | None]
Value = tuple[str | None, Decimal | None]
Partitions = Sequence[Sequence[Row]]
STEP = (
    "CREATE TABLE billing.step (customer_id text, number numeric)"  # without a key, which would refuse repeats itself
)
WRITTEN = "SELECT customer_id, number FROM billing.step"
DELIVERED = "SELECT aggregate_id, (payload->>'number')::numeric FROM outbox.message ORDER BY id"

ROWS: list[list[Row]] = [[("a", 1), ("a", 2)], [("b", 1)]]
rows = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([1, 2, None]))


@dataclass(frozen=True)
class BatchRun:
    """A run of the batch with these rows, cut after so many into Arrow batches."""

    partitions: Partitions
    cut: int
    ended: frozenset[int]  # the partitions whose tasks end; when it is not all of them, the driver dies, too
    commits: bool
    lost: Mapping[int, Sequence[Row]] = field(default_factory=dict)  # of attempts that end, and Spark tries again
    scale: int = 0  # of the decimals; another one makes other numbers of the same digits

    def rows(self, partition: int) -> list[Value]:
        return self._numbers(self.partitions[partition])

    def lost_rows(self, partition: int) -> list[Value]:
        return self._numbers(self.lost[partition])

    def _numbers(self, rows: Sequence[Row]) -> list[Value]:
        return [(key, None if digits is None else Decimal(digits).scaleb(-self.scale)) for key, digits in rows]


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRun]:
    """Runs of one batch; in each a row may be at another place, in another partition, or another one.

    So may the rows of an attempt that Spark tries again in the same run.
    """
    first = draw(st.lists(st.lists(rows, max_size=3), min_size=1, max_size=3))
    partitions, runs = first, []
    for _ in range(draw(st.integers(2, 3))):
        every = frozenset(range(len(partitions)))
        ended = draw(st.just(every) | st.sets(st.sampled_from(sorted(every))).map(frozenset))
        others = st.just(partitions) | _changed(partitions)
        lost = {place: draw(others)[place] for place in draw(st.just(()) | st.sets(st.sampled_from(sorted(every))))}
        scale = draw(st.sampled_from([0, 0, 0, 1]))
        runs.append(BatchRun(partitions, draw(st.integers(1, 3)), ended, draw(st.booleans()), lost, scale))
        partitions = draw(st.just(first) | st.just(partitions) | _changed(partitions))
    return runs


@st.composite
def _changed(draw: st.DrawFn, partitions: Partitions) -> list[list[Row]]:
    changed = [list(partition) for partition in partitions]
    place = st.integers(0, len(changed) - 1)
    source, target = changed[draw(place)], changed[draw(place)]
    row = source.pop(draw(st.integers(0, len(source) - 1))) if source else draw(rows)
    target.insert(draw(st.integers(0, len(target))), draw(st.just(row) | rows))
    return changed


@dataclass
class LedgerModel:
    """What the tables must have: each piece as it was written first, or the whole batch at once."""

    in_pieces: bool
    written: dict[int, tuple[int, list[Value]]] = field(default_factory=dict)  # with the scale of its decimals
    is_complete: bool = False

    def run(self, run: BatchRun, *, is_first: bool) -> bool:
        """BatchRun the batch; False when it is refused."""
        if self.is_complete:
            return True
        if self.in_pieces and (is_first or len(run.partitions) == 1):
            for place in run.lost:
                self.written.setdefault(place, (run.scale, run.lost_rows(place)))
            for place in run.ended:
                self.written.setdefault(place, (run.scale, run.rows(place)))
        if not run.commits or len(run.ended) < len(run.partitions):
            return True
        every = {place: (run.scale, run.rows(place)) for place in range(len(run.partitions))}
        if any(every[place] != piece for place, piece in self.written.items()):
            return False
        self.written = every
        self.is_complete = True
        return True

    @property
    def rows(self) -> list[Value]:
        return [row for place in self.written for row in self.written[place][1]]


@given(runs=batches(), in_pieces=st.booleans())
@example(  # as many rows in each partition, and others
    runs=[
        BatchRun([[("a", 1)], [("a", 2)]], 1, frozenset({0}), commits=False),
        BatchRun([[("a", 2)], [("a", 1)]], 1, frozenset({0, 1}), commits=True),
    ],
    in_pieces=True,
)
@example(  # the same digits, of which another type makes other numbers
    runs=[
        BatchRun([[("a", 1)], [("a", 2)]], 1, frozenset({0}), commits=False),
        BatchRun([[("a", 1)], [("a", 2)]], 1, frozenset({0, 1}), commits=True, scale=1),
    ],
    in_pieces=True,
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_row_is_written_once_or_the_rerun_refused_and_nothing_changed(
    options: dict[str, str], connection: psycopg.Connection, runs: list[BatchRun], in_pieces: bool
) -> None:
    connection.execute(f"DROP TABLE IF EXISTS billing.step; {STEP}; TRUNCATE outbox.message, outbox.batch")
    named = _named(options, len(runs[0].partitions) if in_pieces else None)
    model = LedgerModel(in_pieces)
    for number, run in enumerate(runs):
        is_written = model.run(run, is_first=number == 0)

        if is_written:
            _do(named, run)
        else:
            with pytest.raises(BatchError, match="A rerun takes the same options and types of columns, and the same"):
                _do(named, run)

        assert Counter(connection.execute(WRITTEN).fetchall()) == Counter(model.rows)
        delivered = connection.execute(DELIVERED).fetchall()
        assert Counter(delivered) == Counter(model.rows)
        if not in_pieces or len(runs[0].partitions) == 1:
            assert delivered == model.rows
    if model.is_complete:
        assert staging_tables(connection) == []


@given(
    turns=st.permutations(["first"] * 4 + ["second"] * 4),
    sizes=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    in_pieces=st.booleans(),
    are_alike=st.booleans(),
)
@example(  # the first has written one piece when the second commits
    turns=["first"] * 2 + ["second"] * 4 + ["first"] * 2, sizes=[1, 1], in_pieces=True, are_alike=False
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_drivers_at_once_write_the_rows_of_one(
    options: dict[str, str],
    connection: psycopg.Connection,
    turns: list[str],
    sizes: list[int],
    in_pieces: bool,
    are_alike: bool,
) -> None:
    connection.execute(f"DROP TABLE IF EXISTS billing.step; {STEP}; TRUNCATE outbox.message, outbox.batch")
    named = _named(options, 2 if in_pieces else None)
    frames = {
        driver: [[(f"{place}", digit)] * size for place, size in enumerate(sizes)]
        for driver, digit in (("first", 1), ("second", 1 if are_alike else 2))
    }
    steps = {driver: _steps_of_a_driver(named, rows) for driver, rows in frames.items()}
    committed: list[str] = []
    refused: list[str] = []
    for driver in turns:
        try:
            if next(steps[driver], False):
                committed.append(driver)
        except BatchError:
            refused.append(driver)

        written = Counter(connection.execute(WRITTEN).fetchall())
        assert Counter(connection.execute(DELIVERED).fetchall()) == written
        for place in range(2):  # whole pieces of one of them
            piece = Counter({row: count for row, count in written.items() if row[0] == f"{place}"})
            assert piece in (Counter(), *(Counter(rows[place]) for rows in frames.values()))
        if committed:
            assert written == Counter(row for piece in frames[committed[0]] for row in piece)
    assert committed
    assert not (refused and are_alike)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_slower_driver_recognises_a_batch_whose_staging_tables_are_dropped(
    options: dict[str, str], connection: psycopg.Connection, in_pieces: bool
) -> None:
    connection.execute(STEP)
    named = _named(options, 2 if in_pieces else None)
    _do(named, BatchRun(ROWS, 1, frozenset(), commits=False))  # in pieces: the two that follow are reruns
    slower, _ = prepare(named, _schema(0), overwrite=False)
    staged = [_write(slower, ROWS[0], partition=0, attempt=0)]

    _do(named, BatchRun(ROWS, 1, frozenset({0, 1}), commits=True))
    staged.append(_write(slower, ROWS[1], partition=1, attempt=1))
    OutboxWriter(slower, is_recognised=False).commit([Attempt(each) for each in staged])

    assert connection.execute("SELECT row_counts->'repeats' FROM outbox.batch WHERE partition = -1").fetchone() == (1,)
    assert Counter(connection.execute(WRITTEN).fetchall()) == Counter(ROWS[0] + ROWS[1])
    assert staging_tables(connection) == []


def test_a_stream_that_is_refused_drops_its_own_staging_tables_alone(
    options: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute(STEP)
    named = {**options, "dbtable": "billing.step", "txnAppId": "steps"}
    running, refused = (prepare_stream(named, _schema(0), overwrite=False) for _ in range(2))
    mine, other = (
        _write(save.of_micro_batch(7, "a query"), ROWS[0], partition=0, attempt=0) for save in (running, refused)
    )

    OutboxStreamWriter(refused).abort([StreamAttempt(other, "another"), None], 7)

    assert staging_tables(connection) == [mine.table]
    OutboxStreamWriter(running).commit([StreamAttempt(mine, "a query")], 7)
    assert connection.execute(WRITTEN).fetchall() == ROWS[0]


def test_a_stream_on_an_older_checkpoint_is_refused_and_never_taken_for_written(
    options: dict[str, str], connection: psycopg.Connection
) -> None:
    connection.execute(STEP)
    named = {**options, "dbtable": "billing.step", "txnAppId": "steps"}

    def commit(number: int, rows: Sequence[Row]) -> None:
        save = prepare_stream(named, _schema(0), overwrite=False)
        staged = _write(save.of_micro_batch(number, "a query"), rows, partition=0, attempt=0)
        OutboxStreamWriter(save).commit([StreamAttempt(staged, "a query")], number)

    for number, digits in ((7, 1), (8, 2), (8, 2)):  # the last one as after a crash before Spark's own note of it
        commit(number, [("a", digits)])

    with pytest.raises(BatchError) as refused:
        commit(7, [("a", 3)])

    assert str(refused.value) == (
        "micro-batch 7 of 'steps' comes after micro-batch 8 was written. Its checkpoint is older than the ledger, and "
        "its rows would be lost. Go on with the newest checkpoint. If it is gone, take another name (txnAppId or "
        "app_id), and begin behind the last row that is written, or rows come twice"
    )
    assert connection.execute(WRITTEN).fetchall() == [("a", 1), ("a", 2)]


@given(st.lists(rows, min_size=1), st.data())
def test_a_checksum_follows_from_rows_and_order_alone(given: list[Row], data: st.DataObject) -> None:
    whole = _arrow(given)
    at = data.draw(st.integers(0, len(given)))
    other = data.draw(st.permutations(given) | st.lists(rows, min_size=len(given), max_size=len(given)))

    assert _checksum([whole]) == _checksum([whole[:at], whole[at:at], whole[at:]])
    assert (_checksum([whole]) == _checksum([_arrow(other)])) == (list(given) == list(other))
    assert _checksum([whole]) != _checksum([whole[: len(given) - 1]])


def test_a_checksum_is_the_same_in_every_release_and_on_every_machine() -> None:
    values = {
        "text": pa.array(["ß", None, ""]),
        "flag": pa.array([True, None, False]),
        "number": pa.array([1.5, None, float("nan")]),
        "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "struct": pa.array([{"a": None}, None, {"a": b"\x00"}], pa.struct([("a", pa.binary())])),
        "nothing": pa.nulls(3),
    }
    rows = pa.RecordBatch.from_pydict(values)
    large = rows.set_column(0, "text", values["text"].cast(pa.large_string()))

    assert _checksum([rows]) == "cadef5b7bd48407a1dae106ab1e28171daf7d77ff57c93deca6f97fb94e2cd20"
    assert _checksum([large[:1], large[1:]]) == _checksum([rows])


def _do(given: dict[str, str], run: BatchRun) -> None:
    save, recognised = prepare(given, _schema(run.scale), overwrite=False)
    writer = OutboxWriter(save, is_recognised=recognised is not None)
    if recognised is not None:
        return
    for at in sorted(run.lost):
        _write(save, run.lost[at], partition=at, attempt=100 + at, cut=run.cut, scale=run.scale)
    staged = [
        _write(save, run.partitions[at], partition=at, attempt=at, cut=run.cut, scale=run.scale)
        for at in sorted(run.ended)
    ]
    if run.commits and len(staged) == len(run.partitions):
        writer.commit([Attempt(each) for each in staged])


def _steps_of_a_driver(given: dict[str, str], partitions: Partitions) -> Iterator[bool]:
    """BatchRun a batch step by step; True when the commit has ended."""
    save, recognised = prepare(given, _schema(0), overwrite=False)
    if recognised is not None:
        return
    yield False
    staged: list[Attempt | None] = []
    for place, rows in enumerate(partitions):
        staged.append(Attempt(_write(save, rows, partition=place, attempt=place)))
        yield False
    OutboxWriter(save, is_recognised=False).commit(staged)
    yield True


def _write(save: Save, rows: Sequence[Row], *, partition: int, attempt: int, cut: int = 1, scale: int = 0) -> Staged:
    whole = _arrow(rows, scale)
    batches = [whole[at : at + cut] for at in range(0, len(whole), cut)]
    if save.pieces is None:
        return load(save, batches, partition=partition, attempt=attempt)
    return write_piece(save, save.pieces, batches, partition=partition, attempt=attempt)


def _named(options: dict[str, str], pieces: int | None) -> dict[str, str]:
    named = {**options, "dbtable": "billing.step", "txnAppId": "nightly", "txnVersion": "7"}
    return named if pieces is None else {**named, "atomic": "partition", "numPartitions": str(pieces)}


def _schema(scale: int) -> StructType:
    return StructType().add("customer_id", StringType()).add("number", DecimalType(10, scale))


def _arrow(rows: Sequence[Row], scale: int = 0) -> pa.RecordBatch:
    schema = to_arrow_schema(_schema(scale))
    named = [
        {"customer_id": key, "number": None if digits is None else Decimal(digits).scaleb(-scale)}
        for key, digits in rows
    ]
    return pa.RecordBatch.from_pylist(named, schema)


def _checksum(batches: Sequence[pa.RecordBatch]) -> str:
    checksum = Checksum("made by")
    for batch in batches:
        checksum.add(batch)
    return checksum.hexdigest()
