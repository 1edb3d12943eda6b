"""Correct by the difference: what must be written so that a table has the rows that it ought to have.

wanted ──> one struct a row ──┐
                              ├──> grouped by key ──> checkpoint ──> keys checked ──> new, changed, withdrawn
known  ──> one struct a row ──┘

Both are computed once, in one pass. What is checked here is what the caller writes, also when an executor is lost.
"""

from collections.abc import Iterator, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as spark

from outbox_spark.errors import ColumnError, OptionError, RowError

ADDED = ("change", "before", "after")
COUNTS = {"wanted": "rows of wanted", "known": "rows of known"}  # no name of the caller has a blank inside
DIGITS = {spark.ByteType: 3, spark.ShortType: 5, spark.IntegerType: 10, spark.LongType: 20}  # as Spark widens them
MOST_DIGITS = 38


def differences(
    wanted: DataFrame,
    known: DataFrame,
    *,
    key_columns: Sequence[str],
    compared_columns: Sequence[str] | None = None,
    with_unchanged: bool = False,
) -> DataFrame:
    """Return a row for each key whose rows differ, computed once: Spark has kept it when this returns.

    Its columns are the keys; `change`, which is "new", "changed" or "withdrawn"; and the structs `before` and `after`.
    These have the other columns of `known` and `wanted`. They are null where there is no such row.

    Args:
        wanted: the rows that ought to be there. Use what is returned rather than this again, which Spark would compute
            again.
        known: the rows that are there.
        key_columns: tell one row from all others; both have them, with the same types.
        compared_columns: null equals null, and NaN equals NaN. None: all but the keys, and both have the same columns.
        with_unchanged: return the other keys, too; their `change` is "unchanged".
    Raises:
        OptionError: no key is named, or a name is given twice.
        ColumnError: a column is missing, or cannot be compared; with every fault at once.
        RowError: a key is null, or several rows of one side have it.
    """
    compared = _compared(wanted, known, key_columns, compared_columns)
    faults = [*_faults(wanted, known, key_columns, compared)]
    if faults:
        raise ColumnError(f"the differences cannot be found: {'; '.join(faults)}")
    both = _rows(wanted, key_columns, "after").unionByName(
        _rows(known, key_columns, "before"), allowMissingColumns=True
    )
    by_key = both.groupBy(*map(_column, key_columns)).agg(
        *(f.first(side, ignorenulls=True).alias(side) for side in ("before", "after")),
        f.count("after").alias(COUNTS["wanted"]),
        f.count("before").alias(COUNTS["known"]),
    )
    kept = by_key.withColumn("change", _change(compared)).localCheckpoint()
    _check_keys(kept, key_columns)
    changes = kept.select(*map(_column, key_columns), *ADDED)
    return changes if with_unchanged else changes.where("change <> 'unchanged'")


def _compared(
    wanted: DataFrame, known: DataFrame, key_columns: Sequence[str], compared_columns: Sequence[str] | None
) -> Sequence[str]:
    """Return the columns that are compared.

    Raises:
        OptionError, ColumnError: they cannot be told.
    """
    if not key_columns:
        raise OptionError("differences takes key_columns, which tell one row from all others")
    if compared_columns is None:
        unequal = sorted(({*wanted.columns} ^ {*known.columns}) - {*key_columns})
        if unequal:
            raise ColumnError(f"wanted or known lacks {', '.join(unequal)}: name compared_columns, which both have")
        compared_columns = [name for name in wanted.columns if name not in key_columns]
    named = [*key_columns, *compared_columns]
    if repeated := sorted({name for name in named if named.count(name) > 1}):
        raise OptionError(f"key_columns and compared_columns name a column once; {', '.join(repeated)} comes again")
    return compared_columns


def _faults(wanted: DataFrame, known: DataFrame, key_columns: Sequence[str], compared: Sequence[str]) -> Iterator[str]:
    types = [{field.name: field.dataType for field in frame.schema.fields} for frame in (wanted, known)]
    for name in (*key_columns, *compared):
        missing = [side for side, found in zip(COUNTS, types, strict=True) if name not in found]
        if missing:
            yield f"{' and '.join(missing)} has no column {name!r}"
            continue
        one, other = types[0][name], types[1][name]
        is_key = name in key_columns
        if not (_is_same(one, other) if is_key else _is_comparable(one, other)):
            remedy = "the same type" if is_key else "types that compare exactly"
            words = f"{one.simpleString()} in wanted and {other.simpleString()} in known"
            yield f"column {name!r} is {words}: cast one, so that both have {remedy}"
        elif not _has_equality(one):
            yield f"column {name!r} is {one.simpleString()}, which Spark does not compare: make it text with to_json()"
    for name in key_columns:
        if name.lower() in ADDED:
            yield f"column {name!r} is a key, and the result has a column of that name: rename it"


def _is_same(one: spark.DataType, other: spark.DataType) -> bool:
    return bool(one.simpleString() == other.simpleString())  # whether nulls are allowed inside is not in it


def _is_comparable(one: spark.DataType, other: spark.DataType) -> bool:
    """Whether two values of these types are equal if and only if Spark says so: a common type must lose no digit."""
    digits = [_digits(each) for each in (one, other)]
    if None in digits:
        return _is_same(one, other)
    before, after = (max(each) for each in zip(*filter(None, digits), strict=True))
    return bool(before + after <= MOST_DIGITS)


def _digits(kind: spark.DataType) -> tuple[int, int] | None:
    """Return how many digits an exact number has in front of its point, and behind."""
    if isinstance(kind, spark.DecimalType):
        return kind.precision - kind.scale, kind.scale
    whole = DIGITS.get(type(kind))
    return None if whole is None else (whole, 0)


def _has_equality(kind: spark.DataType) -> bool:
    match kind:
        case spark.ArrayType():
            return _has_equality(kind.elementType)
        case spark.StructType():
            return all(_has_equality(field.dataType) for field in kind.fields)
        case _:
            return str(kind.typeName()) not in {"map", "variant", "interval"}


def _rows(frame: DataFrame, key_columns: Sequence[str], side: str) -> DataFrame:
    others = [_column(name) for name in frame.columns if name not in key_columns]
    return frame.select(*map(_column, key_columns), f.struct(*others).alias(side))


def _change(compared: Sequence[str]) -> Column:
    same = [f.col("before")[name].eqNullSafe(f.col("after")[name]) for name in compared]
    return (
        f.when(f.isnull("before"), "new")
        .when(f.isnull("after"), "withdrawn")
        .when(reduce(Column.__and__, same, f.lit(True)), "unchanged")
        .otherwise("changed")
    )


def _check_keys(kept: DataFrame, key_columns: Sequence[str]) -> None:
    """Refuse keys that are null, or of several rows of one side.

    Raises:
        RowError: with their number, and the first of them.
    """
    is_null = reduce(Column.__or__, (f.isnull(_column(name)) for name in key_columns))
    is_repeated = reduce(Column.__or__, (_column(count) > 1 for count in COUNTS.values()))
    faulty = kept.where(is_null | is_repeated)
    first = faulty.orderBy(*map(_column, key_columns)).first()
    if first is None:
        return
    key = ", ".join(f"{name} {first[name]}" for name in key_columns)
    counts = ", ".join(f"{first[count]} {count}" for count in COUNTS.values())
    raise RowError(
        f"{faulty.count()} keys do not tell one row from all others, for example {key}: {counts}. Correct the rows, or "
        "name more key_columns"
    )


def _column(name: str) -> Column:
    """Return a column by its whole name, also where that has a point in it."""
    return f.col(f"`{name.replace('`', '``')}`")
