"""Moments as an operator writes them, and as the console and the commands print them."""

from datetime import UTC, datetime, timedelta

import pytest

from relay.errors import UsageError
from relay.observe.printable import utc
from relay.operate.sent.moment import parse_interval, parse_moment

NOW = datetime(2026, 11, 29, 6, 31, 58, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("30m ago", NOW - timedelta(minutes=30)),
        ("3 days", NOW - timedelta(days=3)),
        ("2026-11-29 06:31:58 UTC", NOW),
        (utc(NOW), NOW),
        ("2026-11-29T08:31:58+02:00", NOW),
        ("2026-11-29", NOW.replace(hour=0, minute=0, second=0)),
        ("2026-11-29 UTC", NOW.replace(hour=0, minute=0, second=0)),
        ("2026-10-25T02:30:00+02:00", datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),  # comes twice in Berlin
        ("2026-10-25T02:30:00+01:00", datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
    ],
)
def test_a_moment_is_read_as_it_is_printed(text: str, expected: datetime) -> None:
    assert parse_moment(text, "--since", NOW) == expected


def test_a_time_without_a_zone_is_refused_where_none_is_meant() -> None:
    with pytest.raises(UsageError, match="--since 2026-11-29 06:31:58 says no time zone"):
        parse_moment("2026-11-29 06:31:58", "--since", NOW)

    assert parse_moment("2026-11-29 06:31:58", "From", NOW, zone=UTC) == NOW


@pytest.mark.parametrize(
    "text", ["", "yesterday", "UTC", "2h UTC", "ago", "9" * 400 + "d", "2026-13-01", "0001-01-01 00:00+14:00"]
)
def test_what_is_no_moment_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(UsageError, match="From takes a moment such as 2026"):
        parse_moment(text, "From", NOW, zone=UTC)


def test_an_interval_in_which_nothing_lies_is_refused_by_the_names_of_its_fields() -> None:
    with pytest.raises(UsageError, match="From 1h is not before Before 2h"):
        parse_interval("1h", "2h", NOW, names=("From", "Before"))
