"""What a dead letter tells of itself, and which of them are meant."""

from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from aiormq.abc import DeliveredMessage

from relay.consume.failed.envelope import (
    CONSUMER,
    DEAD_ATTEMPTS,
    DEAD_REASON,
    EXCEPTION,
    EXCEPTION_WORDS,
    FIRST_FAILURE,
    HOST,
    LAST_FAILURE,
    ORIGINAL_EXCHANGE,
    ORIGINAL_ROUTING_KEY,
    given_up,
)
from relay.operate.cause import cause_of, group_of

SOURCE = "dead letter"  # of a failure group


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter without its body; what it does not tell is `None`."""

    position: int  # in the queue, from 1
    message_id: str | None
    type: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None  # both, as in customer/17
    reason: str | None
    exception: str | None  # the last one's class and first line
    attempts: int | None
    first_failed_at: datetime | None
    last_failed_at: datetime | None
    consumer: str | None
    host: str | None
    exchange: str | None  # where it was published
    routing_key: str | None
    size: int  # bytes of the body
    cause: str  # what failed, without numbers, ids and quoted values
    group: str  # of failures


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A dead letter in our hands: nobody else gets it until it is acknowledged, or comes back to its queue."""

    letter: Letter
    delivered: DeliveredMessage

    @property
    def tag(self) -> int:
        """The number that acknowledges it on its channel."""
        return self.delivered.delivery_tag or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection:
    """Which dead letters; what is `None` or empty selects nothing away."""

    message_ids: frozenset[str] = field(default_factory=frozenset)
    type: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    reason: str | None = None
    exception: str | None = None  # a part of it, upper and lower case alike
    consumer: str | None = None
    since: datetime | None = None  # of the last failure
    until: datetime | None = None
    group: str | None = None  # of failures
    limit: int | None = None  # the first so many

    @property
    def is_everything(self) -> bool:
        return not any(getattr(self, each.name) for each in fields(self) if each.name != "limit")

    def as_json(self) -> dict[str, Any]:
        """Return what is set, for the table `job` and for people."""
        given: dict[str, Any] = {each.name: value for each in fields(self) if (value := getattr(self, each.name))}
        if self.message_ids:
            given["message_ids"] = sorted(self.message_ids)
        for name in ("since", "until"):
            if name in given:
                given[name] = given[name].isoformat()
        return given

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "LetterSelection":
        values = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        if "message_ids" in values:
            values["message_ids"] = frozenset(values["message_ids"])
        for name in ("since", "until"):
            if name in values:
                values[name] = datetime.fromisoformat(values[name])
        return cls(**values)

    def matches(self, letter: Letter) -> bool:
        failed_at = letter.last_failed_at
        return (
            (not self.message_ids or letter.message_id in self.message_ids)
            and self.type in (None, letter.type)
            and self.aggregate_type in (None, letter.aggregate_type)
            and self.aggregate_id in (None, letter.aggregate_id)
            and self.reason in (None, letter.reason)
            and self.consumer in (None, letter.consumer)
            and self.group in (None, letter.group)
            and (self.exception is None or self.exception.lower() in (letter.exception or "").lower())
            and (self.since is None or (failed_at is not None and failed_at >= self.since))
            and (self.until is None or (failed_at is not None and failed_at < self.until))
        )


def read_letter(position: int, delivered: DeliveredMessage, queue: str) -> Letter:
    """Read the headers that a consumer has given it, or that tell why the broker did (docs/consumer.md)."""
    properties = delivered.header.properties
    headers = {**(properties.headers or {}), **given_up(delivered)}

    def text(name: str) -> str | None:
        return None if headers.get(name) is None else str(headers[name])

    reason = text(DEAD_REASON)
    exception = ": ".join(words for name in (EXCEPTION, EXCEPTION_WORDS) if (words := text(name))) or None
    cause = cause_of(exception or reason)
    attempts, kind, key = headers.get(DEAD_ATTEMPTS), text("x-aggregate-type"), text("x-aggregate-id")
    return Letter(
        position=position,
        message_id=properties.message_id,
        type=properties.message_type,
        aggregate_type=kind,
        aggregate_id=key,
        key=key and f"{kind}/{key}",
        reason=reason,
        exception=exception,
        attempts=attempts if isinstance(attempts, int) else None,
        first_failed_at=_moment(text(FIRST_FAILURE)),
        last_failed_at=_moment(text(LAST_FAILURE)),
        consumer=text(CONSUMER),
        host=text(HOST),
        exchange=text(ORIGINAL_EXCHANGE),
        routing_key=text(ORIGINAL_ROUTING_KEY),
        size=len(delivered.body),
        cause=cause,
        group=group_of(SOURCE, cause, properties.message_type, queue),
    )


def _moment(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # it is no date, or before the first one
        return None
