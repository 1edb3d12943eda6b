"""A URL from which libpq would take a piece of the password for something else is refused, and not repeated."""

import pytest

from outbox_spark.connection import conninfo
from outbox_spark.errors import OptionError


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter/2@h/d",
        "postgresql://u:12/hunter@h/d",
        "postgresql://u:hunt@er@h/d",
        "postgresql://u:hunter",
        "postgresql://u:%hunter@h/d",
    ],
)
def test_a_url_that_can_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(OptionError) as refused:
        conninfo(url)

    assert "hunt" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:a?b#c@h:1,h2/d?application_name=x@y",
        "postgresql://u:%40@[::1]:5432/d%40e",
        "host=h dbname=d@e",
        "postgresql:///d",
    ],
)
def test_a_url_that_libpq_reads_in_one_way_is_taken(url: str) -> None:
    assert "dbname" in conninfo(url)
