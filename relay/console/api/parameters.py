"""What requests are made of: texts and ids that the database can take, and the filters of the lists."""

from typing import Annotated
from uuid import UUID

from pydantic import Field

from relay.errors import UsageError
from relay.jobs.job import BELOW_RATE, LEAST_RATE, Caution
from relay.operate.asked import MOST, Closed, Group, Id, MessageFilter, Moment, RowNames, Text
from relay.operate.messages.whereabouts import RowId, row_ids
from relay.operate.parked import read as parked
from relay.operate.sent.selection import Filter


class ParkedFilter(MessageFilter):
    """Which parked rows."""

    ids: RowNames = ()
    reason: Annotated[Text | None, Field(description="A part of the reason.")] = None
    group: Group = None

    def selection(self, limit: int | None) -> parked.Selection:
        """Return the rows that it means; UsageError for what is no id."""
        ids = row_ids(self.ids)
        return parked.Selection(
            ids=[each for each in ids if isinstance(each, int)] or None,
            message_ids=[each for each in ids if isinstance(each, UUID)] or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            reason=self.reason,
            group=self.group,
            limit=limit,
        )


class Paced(Closed):
    """A job, and how fast it goes."""

    rate: Annotated[float | None, Field(ge=LEAST_RATE, lt=BELOW_RATE, description="Rows a second, at most.")] = None

    def caution(self) -> Caution:
        """Return how carefully the job goes on; UsageError when the parts do not fit together."""
        return Caution(rate=self.rate)


class Staged(Paced):
    """A job, and how carefully it goes on."""

    stages: Annotated[tuple[Id, ...], Field(max_length=20, description="Wait for the outcome after so many rows.")] = ()
    stop_when_failing: Annotated[
        float | None, Field(ge=0, le=1, description="Pause when more than this share of a stage fails.")
    ] = None

    def caution(self) -> Caution:
        if list(self.stages) != sorted({*self.stages}):
            raise UsageError("stages: rising numbers, such as [1, 10, 100]")
        if self.stop_when_failing is not None and not self.stages:
            raise UsageError("stop_when_failing needs stages, such as [1, 10, 100]")
        return Caution(rate=self.rate, stages=self.stages, stop_when_failing=self.stop_when_failing)


class ReplayFilter(MessageFilter):
    """Which sent rows."""

    message_ids: Annotated[tuple[UUID, ...], Field(max_length=MOST)] = ()
    since: Moment = None
    until: Moment = None

    def filter(self) -> Filter:
        """Return the filter as the operation takes it."""
        return Filter(
            message_ids=list(self.message_ids) or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            since=self.since,
            until=self.until,
        )


def row_id(name: str) -> RowId:
    """Return the id or message id; UsageError when it is neither."""
    (found,) = row_ids([name])
    return found
