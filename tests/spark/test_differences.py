"""The correction by difference, next to a count in plain Python over drawn rows."""

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_spark import ColumnError, OptionError, RowError, differences

pytestmark = pytest.mark.jobs

Key = tuple[str, date]
Values = dict[str, Any]
Rows = dict[Key, Values]
Side = tuple[Values | None, Values | None]

KEYS = ["shop", "day"]
NAMES = ["pieces", "amount", "rate", "at", "note", "tags"]
# The types of the two sides are those of a calculation, and of a table that holds more.
WANTED = (
    "shop string, day date, pieces int, amount decimal(12, 2), rate double, at timestamp, note string, tags array<int>"
)
KNOWN = (
    "shop string, day date, pieces long, amount decimal(22, 4), rate double, at timestamp, note string, tags array<int>"
)
VALUES = st.fixed_dictionaries(
    {
        "pieces": st.none() | st.integers(-2, 2),
        "amount": st.none() | st.integers(-200, 200).map(lambda cents: Decimal(cents).scaleb(-2)),
        "rate": st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf]),
        "at": st.none() | st.integers(0, 3).map(lambda micros: datetime(2026, 11, 1, 2, 30, 0, micros, UTC)),
        "note": st.none() | st.sampled_from(["", "a", "A", "a "]),
        "tags": st.none() | st.lists(st.none() | st.integers(0, 1), max_size=2),
    }
)
ROWS: st.SearchStrategy[Rows] = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.dates(date(2026, 11, 1), date(2026, 11, 5))), VALUES, max_size=15
)


@st.composite
def sides(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Draw what is known, and of it what is wanted: much is the same, or differs in one column."""
    known, wanted = draw(ROWS), draw(ROWS)
    for key, values in known.items():
        match draw(st.sampled_from(["same", "one column", "other", "gone"])):
            case "same":
                wanted[key] = values
            case "one column":
                name = draw(st.sampled_from(sorted(values)))
                wanted[key] = {**values, name: draw(VALUES)[name]}
            case "gone":
                wanted.pop(key, None)
    return wanted, known


@settings(max_examples=12, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sides())
def test_what_differs_is_what_a_count_in_python_says(spark: SparkSession, drawn: tuple[Rows, Rows]) -> None:
    wanted, known = drawn

    found = differences(frame(spark, wanted, WANTED), frame(spark, known, KNOWN), key_columns=KEYS, with_unchanged=True)

    assert {key: change for key, (change, _) in read(found).items()} == {
        key: expected(wanted.get(key), known.get(key)) for key in wanted.keys() | known.keys()
    }
    for key, (_, (before, after)) in read(found).items():
        assert is_same(before, known.get(key))
        assert is_same(after, wanted.get(key))


def test_unchanged_keys_are_left_out_and_columns_that_are_not_compared_come_along(spark: SparkSession) -> None:
    wanted = spark.createDataFrame([(1, 5, "x"), (2, 6, "y"), (3, 7, "z")], "id int, `the.sum` int, file string")
    known = spark.createDataFrame([(1, 5, 9), (2, 5, 9), (4, 5, 9)], "id int, `the.sum` int, revision int")

    found = differences(wanted, known, key_columns=["id"], compared_columns=["the.sum"])

    rows = {row.id: (row.change, row.before, row.after) for row in found.collect()}
    assert rows == {2: ("changed", (5, 9), (6, "y")), 3: ("new", None, (7, "z")), 4: ("withdrawn", (5, 9), None)}


def test_rows_of_keys_alone_are_new_or_withdrawn(spark: SparkSession) -> None:
    one, other = spark.createDataFrame([(1,), (2,)], "id int"), spark.createDataFrame([(2,), (3,)], "id int")

    found = differences(one, other, key_columns=["id"])

    assert sorted((row.id, row.change) for row in found.collect()) == [(1, "new"), (3, "withdrawn")]


def test_what_would_be_another_when_it_is_computed_again_is_computed_once(spark: SparkSession) -> None:
    wanted = spark.range(20).withColumn("seen_at", f.current_timestamp())
    known = spark.range(10).withColumn("seen_at", f.timestamp_micros(f.lit(0)))

    found = differences(wanted, known, key_columns=["id"])

    assert sorted(found.select("after").collect()) == sorted(found.select("after").collect())
    assert found.where("change = 'new'").count() == 10


REPEATED: list[tuple[list[tuple[int | None, int]], list[tuple[int | None, int]], str]] = [
    ([(1, 0), (1, 0)], [(1, 0)], "1 keys do not tell .*, for example id 1: 2 rows of wanted, 1 rows of known"),
    ([(1, 0)], [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)], "2 keys .* id 2: 0 rows of wanted, 2 rows of known"),
    ([(None, 0)], [(1, 0)], "1 keys .* id None: 1 rows of wanted, 0 rows of known. Correct the rows, or name more"),
]


@pytest.mark.parametrize(("wanted", "known", "words"), REPEATED)
def test_a_key_that_is_null_or_of_several_rows_is_refused_by_name(
    spark: SparkSession, wanted: list[tuple[int | None, int]], known: list[tuple[int | None, int]], words: str
) -> None:
    with pytest.raises(RowError, match=words):
        differences(
            spark.createDataFrame(wanted, "id int, n int"),
            spark.createDataFrame(known, "id int, n int"),
            key_columns=["id"],
        )


UNLIKE = [
    ("n int", "n string", "column 'n' is int in wanted and string in known: cast one"),
    ("n double", "n decimal(12, 2)", "column 'n' is double in wanted and decimal"),
    ("n float", "n double", "column 'n' is float in wanted and double in known"),
    ("n timestamp", "n timestamp_ntz", "column 'n' is timestamp in wanted and timestamp_ntz in known"),
    ("n decimal(38, 0)", "n decimal(38, 6)", "column 'n' is decimal.38,0. in wanted and decimal.38,6. in known"),
    ("n map<string, int>", "n map<string, int>", "column 'n' is map<string,int>, which Spark does not compare"),
    ("n int", "m int", "wanted or known lacks m, n: name compared_columns, which both have"),
]


@pytest.mark.parametrize(("wanted", "known", "words"), UNLIKE)
def test_columns_that_do_not_compare_exactly_are_refused(
    spark: SparkSession, wanted: str, known: str, words: str
) -> None:
    with pytest.raises(ColumnError, match=words):
        differences(
            spark.createDataFrame([], f"id int, {wanted}"),
            spark.createDataFrame([], f"id int, {known}"),
            key_columns=["id"],
        )


def test_every_fault_of_the_named_columns_is_told_at_once(spark: SparkSession) -> None:
    one = spark.createDataFrame([], "id int, n int, change int")
    other = spark.createDataFrame([], "id long, n date, change int")

    with pytest.raises(ColumnError) as failed:
        differences(one, other, key_columns=["id", "change"], compared_columns=["n", "m"])

    assert str(failed.value) == (
        "the differences cannot be found: "
        "column 'id' is int in wanted and bigint in known: cast one, so that both have the same type; "
        "column 'n' is int in wanted and date in known: cast one, so that both have types that compare exactly; "
        "wanted and known has no column 'm'; "
        "column 'change' is a key, and the result has a column of that name: rename it"
    )


def test_keys_that_are_not_named_or_named_twice_are_refused(spark: SparkSession) -> None:
    one = spark.createDataFrame([], "id int, n int")

    with pytest.raises(OptionError, match="differences takes key_columns"):
        differences(one, one, key_columns=[])
    with pytest.raises(OptionError, match="name a column once; id comes again"):
        differences(one, one, key_columns=["id"], compared_columns=["n", "id"])


def frame(spark: SparkSession, rows: Rows, schema: str) -> DataFrame:
    return spark.createDataFrame([(*key, *(values[name] for name in NAMES)) for key, values in rows.items()], schema)


def read(found: DataFrame) -> dict[Key, tuple[str, Side]]:
    """Return what was found, with moments in UTC: the driver gets them in the zone of its host."""

    def values(row: Any) -> Values | None:
        if row is None:
            return None
        return {**row.asDict(), "at": row["at"] and row["at"].astimezone(UTC)}

    return {(row.shop, row.day): (row.change, (values(row.before), values(row.after))) for row in found.collect()}


def expected(wanted: Values | None, known: Values | None) -> str:
    if known is None:
        return "new"
    if wanted is None:
        return "withdrawn"
    return "unchanged" if is_same(wanted, known) else "changed"


def is_same(one: Values | None, other: Values | None) -> bool:
    """Whether two rows have the same values: null is null, and NaN is NaN."""
    if one is None or other is None:
        return one is other
    is_nan: Callable[[object], bool] = lambda value: isinstance(value, float) and math.isnan(value)  # noqa: E731
    return all(value == other[name] or (is_nan(value) and is_nan(other[name])) for name, value in one.items())
