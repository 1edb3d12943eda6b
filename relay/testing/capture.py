"""See what an application hands to the outbox, also what it rolls back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relay.outbox import watch
from relay.outbox.row import NewRow
from relay.testing.written import Written, given


@contextmanager
def capture() -> Iterator[list[Written]]:
    """Yield a list that gets each event of `add`, `add_many` and `OutboxMessage`, in every thread, until the end.

    What is in the list and not in `Outbox(...).all()` was rolled back, or its `add` failed or was not awaited:

        with capture() as events, pytest.raises(CardDeclined):
            check_out(session, cart)

        assert events[0].event_type == "OrderPlaced"
        Outbox(session).assert_nothing_written()
    """
    events: list[Written] = []

    def note(rows: Sequence[NewRow]) -> None:
        events.extend(map(given, rows))

    with watch.watching(note):
        yield events
