"""Find what would differ when it is computed a second time: in the text of Spark's analyzed plans.

Each DataFrame of a batch is computed once. Two of them that were made of one share its steps, which then run twice. In
their plans these steps are the same lines, with the same numbers of columns.
"""

import re
from collections.abc import Sequence
from itertools import combinations

from pyspark.sql import DataFrame

from outbox_spark.errors import BatchError

ANALYZED = re.compile(r"== Analyzed Logical Plan ==\n(.*?)\n\s*== Optimized", re.DOTALL)
EACH_TIME = re.compile(
    r"\b(rand|randn|random|randstr|uuid|shuffle|now|current_timestamp|localtimestamp|current_date|current_time"
    r"|monotonically_increasing_id|spark_partition_id|input_file_name)\("
)
# A call of a Python function, and a step by one, has a number behind its parenthesis. So has a column that is named
# after an expression, whose number a step of the plan gives to it with AS.
PYTHON_CALL = re.compile(r"\)#(\d+)")
NAMED = re.compile(r" AS [^#]*#(\d+)")


def refuse_computed_twice(frames: Sequence[DataFrame]) -> None:
    """Raise BatchError when two DataFrames share a step that may give other values the second time.

    With Spark Connect the plans of two DataFrames have no number in common, and nothing is found.
    """
    if len(frames) < 2:
        return
    steps = [_volatile_steps(_plan_of(frame)) for frame in frames]
    for one, other in combinations(steps, 2):
        if shared := one.keys() & other.keys():
            raise BatchError(
                "nothing of the batch was written: two of its DataFrames are made of one, and share what may differ "
                f"when it is computed again: {', '.join(sorted({one[step] for step in shared}))}. Give rows() and "
                "events() the same DataFrame, which is computed once. Or make both of its localCheckpoint()"
            )


def _plan_of(frame: DataFrame) -> str:
    explained = frame.sparkSession.sql("EXPLAIN EXTENDED SELECT * FROM {frame}", frame=frame).collect()[0][0]
    found = ANALYZED.search(explained)
    return "" if found is None else found[1]


def _volatile_steps(plan: str) -> dict[str, str]:
    """Return each line of a plan that computes such a thing, and its name."""
    calls = set(PYTHON_CALL.findall(plan)) - set(NAMED.findall(plan))
    found = {}
    for line in plan.splitlines():
        if named := EACH_TIME.search(line):
            found[line.lstrip(" :+-|")] = f"{named[1]}()"
        elif calls & set(PYTHON_CALL.findall(line)):
            found[line.lstrip(" :+-|")] = "a Python function"
    return found
