"""What was sent is compared with what consumers have applied: each difference is seen, and nothing else."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from relay.errors import NotFoundError
from relay.operate.reconcile import compare
from relay.operate.sent.selection import SentSelection
from relay.outbox.identity import id_of_writer
from tests.operate.inboxes import DAY, HOUR, MINUTE, Ends, figures


def today() -> date:
    return datetime.now(UTC).date()


def test_what_was_sent_and_applied_is_no_difference(ends: Ends) -> None:
    ends.apply(ends.send(100))

    report = ends.reconcile()

    assert report.differences == []
    assert report.mend is None
    assert figures(report) == {"billing": (100, 100, 0, 0)}
    assert report.rows_of("sent") == 100


@pytest.mark.every_postgres
def test_what_was_sent_and_not_applied_is_named_and_mended_by_id(ends: Ends) -> None:
    sent = ends.send(20)
    ends.apply(sent[2:])

    report = ends.reconcile()

    (billing,) = report.consumers
    assert figures(report) == {"billing": (20, 18, 2, 0)}
    assert {row.message_id for row in billing.missing_first} == set(sent[:2])
    assert report.differences == ["2 of 20 that were sent are not in the inbox of billing"]
    assert report.mend is not None
    assert report.mend.is_exact
    assert {UUID(word) for word in report.mend.command.split() if word.count("-") == 4 and len(word) == 36} == set(
        sent[:2]
    )


def test_each_consumer_is_compared_for_itself(ends: Ends) -> None:
    sent = ends.send(10)
    ends.apply(sent, "billing")
    ends.apply(sent[:4], "audit")

    assert figures(ends.reconcile()) == {"audit": (10, 4, 6, 0), "billing": (10, 10, 0, 0)}
    assert figures(ends.reconcile(consumers=["billing"])) == {"billing": (10, 10, 0, 0)}
    assert figures(ends.reconcile(consumers=["nobody"])) == {"nobody": (10, 0, 10, 0)}


def test_nobody_to_compare_with_is_an_error(ends: Ends) -> None:
    ends.send()

    with pytest.raises(NotFoundError, match="name who does by --consumer"):
        ends.reconcile()


def test_what_was_sent_within_the_grace_period_is_not_yet_expected(ends: Ends) -> None:
    ends.apply([uuid4()], ago=9 * DAY)
    ends.send(3, ago=MINUTE)

    late = ends.reconcile(grace=timedelta(seconds=30))
    young = ends.reconcile(grace=2 * MINUTE)

    assert figures(late) == {"billing": (3, 0, 3, 0)}
    assert figures(young) == {"billing": (0, 0, 0, 0)}
    assert young.rows_of("sent") == 3
    assert young.differences == []


@pytest.mark.parametrize("apart", [-5 * DAY, -2 * HOUR, -MINUTE, MINUTE, 2 * HOUR])
def test_the_borders_make_no_difference(ends: Ends, apart: timedelta) -> None:
    """Applied before or after the border that the row was sent on the other side of, and by far more than is read."""
    for border in (6 * DAY, 6 * DAY + 3 * HOUR):
        ends.apply(ends.send(5, ago=border + MINUTE / 2), ago=border - apart)
        ends.apply(ends.send(5, ago=border - MINUTE / 2), ago=border - apart)

    report = ends.reconcile(since=6 * DAY + 3 * HOUR, until=6 * DAY)

    assert report.differences == []
    assert figures(report) == {"billing": (10, 10, 0, 0)}


def test_only_what_was_sent_between_the_borders_is_expected(ends: Ends) -> None:
    ends.apply([uuid4()], ago=20 * DAY)
    ends.send(1, ago=3 * HOUR)
    ends.send(2, ago=5 * HOUR)
    ends.send(4, ago=7 * HOUR)

    assert figures(ends.reconcile(since=6 * HOUR, until=4 * HOUR))["billing"] == (2, 0, 2, 0)


@pytest.mark.every_postgres
def test_a_consumer_with_an_inbox_by_writer_is_compared_by_writer(ends: Ends) -> None:
    applied = ends.send(20, writer="victim")
    ends.apply(id_of_writer(each, "victim") for each in applied[1:])
    ends.send(writer="attacker", ids=applied[:1])
    ends.apply([id_of_writer(applied[0], "attacker")])
    ends.apply(ends.send(5, writer="victim"))  # before it had this scope
    ends.apply(ends.send(5, writer=""))
    lost = id_of_writer(uuid4(), "victim")
    ends.apply([lost])

    report = ends.reconcile()

    (billing,) = report.consumers
    assert figures(report) == {"billing": (31, 30, 1, 1)}
    assert [row.message_id for row in billing.missing_first] == applied[:1]
    assert [entry.message_id for entry in billing.lost_first] == [lost]


@pytest.mark.every_postgres
def test_what_was_applied_and_has_no_row_in_any_state_is_lost(ends: Ends) -> None:
    ends.apply(ends.send(5))
    lost = [uuid4(), uuid4()]
    ends.apply(lost)
    ends.apply([uuid4()], ago=4 * HOUR)  # before --since
    states = [uuid4() for _ in range(4)]
    ends.rows.pending(message_id=states[0])
    ends.rows.parked(message_id=states[1])
    ends.rows.quarantined("nowhere")
    ends.rows.connection.execute("UPDATE outbox.message SET message_id = %s WHERE state = 'quarantined'", [states[2]])
    ends.rows.pending(message_id=states[3])
    ends.rows.connection.execute("UPDATE outbox.message SET state = 'discarded' WHERE message_id = %s", [states[3]])
    ends.apply(states)

    report = ends.reconcile()

    (billing,) = report.consumers
    assert (billing.lost, billing.missing) == (2, 0)
    assert {each.message_id for each in billing.lost_first} == set(lost)
    assert "2 in the inbox of billing without a row in the table" in report.differences[0]


def test_rows_of_another_day_that_were_sent_again_are_not_lost(ends: Ends) -> None:
    ends.apply(ends.send(5, ago=9 * DAY), "new", ago=HOUR)

    assert figures(ends.reconcile()) == {"new": (0, 0, 0, 0)}


def test_what_is_of_a_day_that_is_no_longer_kept_is_not_lost(ends: Ends) -> None:
    ends.send(1, ago=2 * DAY)  # the first day that is kept
    midnight = datetime.now(UTC) - datetime.combine(today() - 2 * DAY, datetime.min.time(), UTC)
    ends.apply([uuid4()], ago=midnight - 10 * MINUTE)
    ends.apply([uuid4()], ago=3 * DAY)

    def lost(grace: timedelta) -> int:
        return ends.reconcile(since=9 * DAY, until=DAY, grace=grace).consumers[0].lost

    assert lost(5 * MINUTE) == 1
    assert lost(20 * MINUTE) == 0  # its row may have been sent on the day before
    assert ends.reconcile(since=9 * DAY).kept_from == datetime.combine(today() - 2 * DAY, datetime.min.time(), UTC)


def test_a_day_that_is_dropped_meanwhile_makes_no_message_a_lost_one(ends: Ends) -> None:
    ends.apply(ends.send(5, ago=3 * DAY), ago=3 * DAY)
    [(day,)] = ends.rows.connection.execute("SELECT min(tableoid::regclass::text) FROM outbox.message").fetchall()
    ends.send(1, ago=2 * DAY)

    def drop(what: str, done: int, total: int | None) -> None:
        if what == "listing what was sent":
            ends.rows.connection.execute(f"DROP TABLE {day}")

    assert figures(ends.reconcile(since=9 * DAY, until=2 * DAY + HOUR, show=drop)) == {"billing": (0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (SentSelection(event_type="InvoicePaid"), 3),
        (SentSelection(aggregate_type="order"), 0),
        (SentSelection(aggregate_id="7"), 8),
    ],
    ids=str,
)
def test_a_filter_tells_what_is_expected(ends: Ends, selection: SentSelection, expected: int) -> None:
    ends.apply(ends.send(5))
    ends.apply(ends.send(3, event_type="InvoicePaid"))

    report = ends.reconcile(selection=selection)

    assert figures(report) == {"billing": (expected, expected, 0, 0)}
    assert report.rows_of("sent") == expected


@pytest.mark.every_postgres
def test_rows_are_counted_by_day_and_state(ends: Ends) -> None:
    ends.apply(ends.send(3, ago=DAY), ago=DAY)
    ends.apply(ends.send(2, ago=2 * DAY), ago=2 * DAY)
    ends.rows.pending()
    head = ends.rows.parked("2")
    ends.rows.parked("2", behind=head)
    ends.rows.parked("2", behind=head)
    ends.rows.quarantined("nowhere")
    ends.rows.connection.execute(
        "UPDATE outbox.message SET state = 'discarded' WHERE id = %s", [ends.rows.pending("9")]
    )

    report = ends.reconcile(since=3 * DAY)

    totals = {state: report.rows_of(state) for state in ("sent", "pending", "parked", "held", "quarantined")}
    assert totals == {"sent": 5, "pending": 1, "parked": 1, "held": 2, "quarantined": 1}
    assert report.rows_of("discarded") == 1
    assert sum(count.rows for count in report.rows) == 11
    assert len(report.rows) >= 7  # two days of sent ones, and five other states
    assert report.differences == [
        "1 parked: see `relay parked list`",
        "2 held behind parked rows: `relay parked retry` or `discard` lets them go",
        "1 in quarantine, for a route that does not work: see `relay quarantine list`",
    ]


def test_what_is_pending_or_discarded_is_told_and_is_no_difference(ends: Ends) -> None:
    ends.apply(ends.send())
    ends.rows.pending()
    ends.rows.connection.execute(
        "UPDATE outbox.message SET state = 'discarded' WHERE id = %s", [ends.rows.pending("9")]
    )

    assert ends.reconcile().differences == []


def test_a_message_id_of_several_rows_is_told(ends: Ends) -> None:
    sent = ends.send(4)
    ends.send(ids=sent[:1], ago=2 * HOUR)
    ends.rows.pending(message_id=sent[1])
    ends.apply(sent)

    report = ends.reconcile()

    assert report.duplicates == 2
    assert {(each.message_id, each.rows) for each in report.duplicates_first} == {(sent[0], 2), (sent[1], 2)}
    assert report.differences == ["message ids on several rows: 2; an inbox lets one row of each through"]
    assert figures(report) == {"billing": (4, 4, 0, 0)}


def test_business_keys_are_counted_when_asked_for(ends: Ends) -> None:
    sent = ends.send(6)
    ends.apply(sent[:2], business_key="a")
    ends.apply(sent[2:5], business_key="b")
    ends.apply(sent[5:], business_key="c")

    asked = ends.reconcile(with_repeated_keys=True, limit=1)

    assert ends.reconcile().repeated_keys is None
    assert ends.reconcile().differences == []
    assert asked.repeated_keys == 2
    assert [(each.business_key, each.messages) for each in asked.repeated_keys_first] == [("a", 2)]
    assert asked.differences == ["business keys applied by several messages: 2"]


def test_many_are_counted_and_the_first_are_named(ends: Ends) -> None:
    ends.apply([uuid4() for _ in range(30)])
    ends.send(300)

    report = ends.reconcile(limit=7)

    (billing,) = report.consumers
    assert (billing.missing, billing.lost) == (300, 30)
    assert (len(billing.missing_first), len(billing.lost_first)) == (7, 7)
    assert report.mend is not None
    assert not report.mend.is_exact
    assert report.mend.command.split()[-1] == "--event-type=InvoiceIssued"  # no id follows


def test_the_pieces_in_which_it_looks_make_no_difference(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "ROWS_PER_LOOK", 3)
    monkeypatch.setattr(compare, "ENTRIES_PER_LOOK", 3)
    sent = ends.send(50)
    ends.apply(sent[:40], "a")
    ends.apply(sent[10:], "b")
    ends.apply([uuid4() for _ in range(10)], "a")
    ends.apply(ends.send(10, ago=5 * DAY), "b")

    assert figures(ends.reconcile()) == {"a": (50, 40, 10, 10), "b": (50, 40, 10, 0)}


def note(ends: Ends, consumer: str, event_types: list[str] | None, *, queue: str = "billing") -> None:
    """Note what a consumer does at its start."""
    ends.inbox.execute(
        "INSERT INTO outbox.consumer_queue (consumer_name, queue, event_types) VALUES (%s, %s, %s)",
        [consumer, queue, event_types],
    )


def test_of_a_consumer_only_the_types_are_expected_that_it_handles(ends: Ends) -> None:
    issued, paid = ends.send(5), ends.send(3, event_type="InvoicePaid")
    ends.apply(issued, "billing")
    ends.apply(paid, "payments")
    note(ends, "billing", ["InvoiceIssued"])
    note(ends, "payments", ["InvoicePaid"], queue="payments")

    report = ends.reconcile()

    assert report.differences == []
    assert report.mend is None
    assert figures(report) == {"billing": (5, 5, 0, 0), "payments": (3, 3, 0, 0)}


def test_the_types_of_several_queues_add_up_and_every_type_is_more(ends: Ends) -> None:
    ends.apply(ends.send(5), "billing")
    ends.send(3, event_type="InvoicePaid")
    note(ends, "billing", ["InvoiceIssued"])
    assert figures(ends.reconcile()) == {"billing": (5, 5, 0, 0)}

    note(ends, "billing", ["InvoicePaid"], queue="payments")
    assert figures(ends.reconcile()) == {"billing": (8, 5, 3, 0)}

    note(ends, "billing", None, queue="audit")
    assert figures(ends.reconcile()) == {"billing": (8, 5, 3, 0)}


def test_a_replay_is_of_the_one_type_that_is_missing(ends: Ends) -> None:
    ends.apply(ends.send(5), "billing")
    ends.send(compare.IDS_KEPT + 1, event_type="InvoicePaid")
    note(ends, "billing", ["InvoiceIssued", "InvoicePaid"])

    report = ends.reconcile()

    assert report.mend is not None
    assert "--event-type=InvoicePaid" in report.mend.command


def test_without_the_right_to_read_it_everything_is_expected(ends: Ends) -> None:
    ends.apply(ends.send(5), "billing")
    ends.send(3, event_type="InvoicePaid")
    ends.inbox.execute("DROP TABLE outbox.consumer_queue")

    assert figures(ends.reconcile()) == {"billing": (8, 5, 3, 0)}
