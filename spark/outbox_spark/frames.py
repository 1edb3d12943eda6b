"""The DataFrames of a batch: each is computed once, whatever is made of it.

Computed twice, a DataFrame may give other rows: another `current_timestamp()`, other ids from a Python function. So its
business rows and its events come from one pass over it, and what is made of one row always agrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from outbox_spark.errors import OptionError
from outbox_spark.fits import MESSAGE_KEY
from outbox_spark.plan import MakeEvents, Maker, Plan
from outbox_spark.tables import EVENT_FIELDS, EVENT_TEXTS, plan_events

OF_SOME_ROWS = (
    "with only_changed, if_absent or delete_column some rows make no event. So say rows(..., events=Events(...)) "
    "without a function, and do not call events() with the same DataFrame"
)

OF_GOOD_ROWS = (
    "with bad_rows='quarantine' one call of rows() tells which rows of a DataFrame are good. Besides it, the DataFrame "
    "may have the events of these: rows(..., events=Events(...)) or one events() behind it, without a function"
)


class Events:
    """What events a DataFrame's rows become.

    What an event consists of is named as in outbox.message: aggregate_type, aggregate_id, event_type, payload, headers,
    exchange, routing_key, content_type, available_at, message_id. Without more the DataFrame's columns are these.
    """

    def __init__(
        self,
        *,
        function: MakeEvents | None = None,
        struct: str | None = None,
        message_key: Column | None = None,
        order_by: Sequence[Column | str] = (),
        **fields: Column | str,
    ) -> None:
        """Name what the events are made of.

        Args:
            fields: each a text that all events have, or a Column; then no other column of the DataFrame is taken.
            function: makes the event, several or `None` of a row, which it gets as a dict.
            struct: the column that has an event's fields inside.
            message_key: message ids follow from it and from type and key of the event, not from the batch. So consumers
                know an event that comes again in another batch.
            order_by: orders the events over all partitions; else a partition's are in the DataFrame's order.
        Raises:
            OptionError: an event has no such field, or these exclude each other.
        """
        given = {**fields, **({} if message_key is None else {MESSAGE_KEY: message_key})}
        if unknown := given.keys() - set(EVENT_FIELDS):
            raise OptionError(f"an event has {', '.join(EVENT_FIELDS)}, not {', '.join(sorted(unknown))}")
        self.function = function
        self.struct = struct
        self.order_by = tuple(order_by)
        self.same = {name: value for name, value in given.items() if name in EVENT_TEXTS and isinstance(value, str)}
        self.columns = [
            (f.lit(value) if isinstance(value, str) else value).alias(name)
            for name, value in given.items()
            if name not in self.same
        ]
        if (function is not None) + (struct is not None) + bool(self.columns) > 1:
            raise OptionError("function, struct and Columns exclude each other: each gives all that differs in rows")

    def maker(self) -> Maker | None:
        """Return what makes them with Python; None when Spark makes them."""
        if self.function is None:
            return None
        fields = [name for name in EVENT_FIELDS if name not in self.same and name not in {MESSAGE_KEY, "available_at"}]
        return Maker(self.function, tuple(fields))


@dataclass(slots=True)
class Frame:
    """A DataFrame of the batch, and what is made of it; `parts` are places in the batch's own list of plans."""

    given: DataFrame
    parts: list[int] = field(default_factory=list)
    added: list[Column] = field(default_factory=list)  # of events
    order_by: tuple[Column | str, ...] = ()
    has_events_of_all: bool = False  # by events(): of each row, whatever becomes of it in a table
    is_whole: bool = False  # whether its own columns are taken, too, in front of those

    @property
    def front(self) -> int:
        """How many columns are in front of those that were added."""
        return len(self.given.columns) if self.is_whole else 0

    def computed(self, most_partitions: int | None) -> DataFrame:
        """Return what the one pass computes."""
        frame = self._in_order(most_partitions)
        if not self.added:
            return frame
        return frame.select(*(["*"] if self.is_whole else []), *self.added)

    def _in_order(self, most_partitions: int | None) -> DataFrame:
        if self.order_by and most_partitions is not None:
            ranged = self.given.repartitionByRange(most_partitions, *self.order_by)
            return ranged.sortWithinPartitions(*self.order_by)
        if self.order_by:
            return self.given.orderBy(*self.order_by)  # the partitions follow each other in that order
        return self.given if most_partitions is None else self.given.coalesce(most_partitions)


class Frames:
    """Every DataFrame of a batch, and the plans of what is made of them, in the order of the calls."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._plans: list[Plan] = []
        self._of_added: set[int] = set()  # plans whose events are made of columns that were added

    def add_rows(self, given: DataFrame, plan: Plan, events: Events | None) -> None:
        """Add the rows of a business table, and the events that they become.

        Raises:
            OptionError: which rows make these events cannot be told, or earlier events have another order. Or something
                else is made of rows that are quarantined here or in another call.
            ColumnError: with every fault at once.
        """
        frame = self._frame_of(given)
        is_made_elsewhere = bool(frame.parts) or (events is not None and events.function is not None)
        if self._may_lose_rows(frame) or (plan.quarantine is not None and is_made_elsewhere):
            raise OptionError(OF_GOOD_ROWS)
        if plan.passes_over and (frame.has_events_of_all or (events is not None and events.function is not None)):
            raise OptionError(OF_SOME_ROWS)
        frame.is_whole = True
        self._add(frame, plan)
        if events is not None:
            self._add_events(frame, events, frame.parts[-1])

    def add_events(self, given: DataFrame, events: Events) -> None:
        """Add events; they go into the staging table of the DataFrame's business rows where Spark makes them.

        Raises:
            OptionError: the DataFrame's earlier events have another order, or some of its rows make no event.
            ColumnError: with every fault at once.
        """
        frame = self._frame_of(given)
        if any(self._plans[part].passes_over for part in frame.parts):
            raise OptionError(OF_SOME_ROWS)
        rows = next((part for part in frame.parts if self._plans[part].event is None), None)
        if self._may_lose_rows(frame) and (rows is None or events.function is not None):
            raise OptionError(OF_GOOD_ROWS)
        frame.has_events_of_all = True
        self._add_events(frame, events, rows)

    def _may_lose_rows(self, frame: Frame) -> bool:
        return any(self._plans[part].quarantine is not None for part in frame.parts)

    def _add_events(self, frame: Frame, events: Events, rows: int | None) -> None:
        """Add events to the plan of rows; None: all of them have events."""
        if any(self._plans[part].event is not None for part in frame.parts) and events.order_by != frame.order_by:
            raise OptionError(
                "order_by differs from that of earlier events of this DataFrame, which is computed once. Take "
                "kept = frame.localCheckpoint(), and give kept and kept.select('*') to the calls of events()"
            )
        plan, columns = self._planned(frame, events)
        frame.order_by = events.order_by
        frame.is_whole |= not columns
        frame.added += columns
        if rows is None or events.function is not None:
            self._add(frame, plan)
            rows = frame.parts[-1]
        else:
            self._plans[rows] = replace(self._plans[rows], event=plan.event)
        if columns:
            self._of_added.add(rows)

    def plans(self) -> list[Plan]:
        """Return the plans, when all is added."""
        found = list(self._plans)
        for frame in self.frames:
            for part in self._of_added.intersection(frame.parts):
                event = found[part].event
                found[part] = replace(found[part], event=event and event.after(frame.front))
        return found

    def _planned(self, frame: Frame, events: Events) -> tuple[Plan, list[Column]]:
        """Return the plan of events, and the columns that they are made of where they are not the DataFrame's."""
        number = sum(plan.event is not None for plan in self._plans)
        maker = events.maker()
        if maker is not None:
            made = StructType([StructField(name, StringType()) for name in maker.fields])
            return plan_events(made, events.same, number=number, maker=maker), []
        if events.struct is not None:
            schema = frame.given.select(f"{events.struct}.*").schema
            columns = [f.col(events.struct)[name] for name in schema.names]
        elif events.columns:
            schema, columns = frame.given.select(*events.columns).schema, events.columns
        else:
            return plan_events(frame.given.schema, events.same, number=number), []
        plan = plan_events(schema, events.same, number=number)
        # Named apart, as the DataFrame may have columns of these names.
        named = [
            column.alias(f"{name} of events() {number + 1}") for name, column in zip(schema.names, columns, strict=True)
        ]
        return replace(plan, event=plan.event and plan.event.after(len(frame.added))), named

    def _frame_of(self, given: DataFrame) -> Frame:
        for frame in self.frames:
            if frame.given is given:
                return frame
        self.frames.append(Frame(given))
        return self.frames[-1]

    def _add(self, frame: Frame, plan: Plan) -> None:
        frame.parts.append(len(self._plans))
        self._plans.append(plan)
