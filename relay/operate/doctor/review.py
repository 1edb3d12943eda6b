"""The producer's answers for a design review, each with the value in use.

What a message is like comes from encoding one as the relay does and reading it back. The rest comes from the settings
and from the engine's own constants.
"""

from collections.abc import Iterator
from uuid import uuid4

import pamqp.frame
from pamqp.commands import Basic
from pamqp.constants import FRAME_MIN_SIZE
from pamqp.header import ContentHeader

from relay.config.settings import Settings
from relay.engine.row import Row
from relay.engine.send import broker_link as link
from relay.engine.send.codec import CODEC, Encoder
from relay.engine.send.message import PERSISTENT, REDELIVERED, MessageIdentity
from relay.engine.send.routes import Router
from relay.engine.settle import quarantine
from relay.operate.doctor.finding import Finding, Verdict
from relay.runtime.memory import size_words
from relay.servers.rabbitmq.connection import HEARTBEATS_UNTIL_GONE


def review(settings: Settings) -> Iterator[Finding]:
    """Answer for this configuration; asks neither the database nor the broker."""
    yield from _message(settings)
    yield _given(
        "review.confirms", link.CONFIRMS, "every channel is in confirm mode; a row is marked sent after its confirm"
    )
    yield _in_flight(settings)
    yield Finding("review.codec", Verdict.OK, f"the codec that encodes messages is {CODEC}")
    yield Finding(
        "review.returns",
        Verdict.OK,
        "what is returned or has no exchange waits in quarantine, in nobody's way. Its route is tried after"
        f" {quarantine.PROBE_INITIAL:g} s and at least every {quarantine.PROBE_MAX:g} s",
    )
    yield _timeouts(settings)
    yield _retry(settings)
    yield _growth(settings)


def _message(settings: Settings) -> Iterator[Finding]:
    row = Row(
        lane=0, id=1, message_id=str(uuid4()).encode(), aggregate_type=b"doctor", aggregate_id=b"1",
        event_type=b"Asked", exchange=None, routing_key=b"doctor", content_type=None, headers=None, traceparent=None,
        tracestate=None, payload=None, payload_bytes=b"", created_at=0, attempts=0, backoff_ms=0, excess=None, cost=0,
    )  # fmt: skip
    is_mandatory, first = _sent(row, settings, redelivered=False)
    _, again = _sent(row, settings, redelivered=True)
    is_stable = first.message_id == again.message_id == row.message_id.decode()
    yield _given("review.message_id", is_stable, "a message has its row's message_id, each time that it is sent")
    is_told = bool((again.headers or {}).get(REDELIVERED))
    yield _given("review.repeats", is_told, f"what may be a repeat says so in the header {REDELIVERED}")
    yield _given("review.mandatory", is_mandatory, "the broker returns what no queue takes (mandatory)")
    mode = first.delivery_mode
    yield _given("review.persistence", mode == PERSISTENT, f"messages have delivery mode {mode} (persistent)")


def _sent(row: Row, settings: Settings, *, redelivered: bool) -> tuple[bool, Basic.Properties]:
    """Return what the relay makes of a row: whether it is mandatory, and its properties."""
    encoder = Encoder(1, FRAME_MIN_SIZE, Router.of(settings), MessageIdentity.of(settings))
    data = encoder.encode((row,), {row.id} if redelivered else ()).frames
    size, _, publish = pamqp.frame.unmarshal(data)
    _, _, header = pamqp.frame.unmarshal(data[size:])
    if not isinstance(publish, Basic.Publish) or not isinstance(header, ContentHeader):
        raise TypeError(f"a message begins with {publish!r} and {header!r}")
    return publish.mandatory, header.properties


def _given(check: str, holds: bool, words: str) -> Finding:
    if holds:
        return Finding(check, Verdict.OK, words)
    return Finding(check, Verdict.FAILED, f"it does not hold that {words}", "this release is broken: install another")


def _in_flight(settings: Settings) -> Finding:
    relay = settings.relay
    words = (
        f"at most {relay.max_in_flight} messages are unconfirmed; at most {relay.max_window_rows} rows and"
        f" {size_words(relay.max_window_bytes)} are read ahead"
    )
    if relay.max_window_rows < relay.max_in_flight:
        remedy = "raise relay.max_window_rows: no more than it can be in flight"
        return Finding("review.in_flight", Verdict.WARNING, words, remedy)
    return Finding("review.in_flight", Verdict.OK, words)


def _timeouts(settings: Settings) -> Finding:
    seconds = settings.broker.confirm_timeout
    silent = settings.broker.heartbeat * HEARTBEATS_UNTIL_GONE
    words = f"no confirm within {seconds:g} s means unknown: the message is sent again, and burns no attempt"
    if seconds <= silent:
        remedy = f"raise broker.confirm_timeout above {silent} s, two heartbeats, after which a silent broker is left"
        return Finding("review.timeouts", Verdict.WARNING, f"{words}, also while a broker is merely slow", remedy)
    return Finding("review.timeouts", Verdict.OK, words)


def _retry(settings: Settings) -> Finding:
    relay = settings.relay
    waits = (min(relay.backoff_max, relay.backoff_initial * 2.0**attempt) for attempt in range(relay.max_attempts - 1))
    longest = sum(waits)
    words = (
        f"a row stays in the table until it is confirmed. Refused {relay.max_attempts} times in"
        f" {longest / 2:.0f} to {longest:.0f} s it is parked, and outages do not count"
    )
    if relay.max_attempts == 1:
        remedy = "raise relay.max_attempts: one refusal parks a row"
        return Finding("review.retry", Verdict.WARNING, words, remedy)
    return Finding("review.retry", Verdict.OK, words)


def _growth(settings: Settings) -> Finding:
    check, relay, address = "review.growth", settings.relay, settings.http.listen
    kept = "for ever" if relay.retention_days is None else f"for {relay.retention}"
    watched = f"watched at http://{address}/metrics" if address else "watched by nobody, as http.listen is empty"
    words = f"sent rows are kept {kept}; the backlog is {watched}"
    remedies = [
        *(["set relay.retention, or drop days by `relay retention`"] if relay.retention_days is None else []),
        *([] if address else ["name an address in http.listen, and load the alerts that `relay config alerts` prints"]),
    ]
    return Finding(check, Verdict.WARNING if remedies else Verdict.OK, words, "; ".join(remedies))
