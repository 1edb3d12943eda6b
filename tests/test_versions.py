"""The doctor tells what is newer than the newest that docs/versions.md names."""

from relay.operate.doctor.broker_hosts import NEWEST_BROKER
from relay.operate.doctor.server import NEWEST_SERVER
from tests.support.versions import documented


def test_the_doctor_knows_the_newest_of_the_table() -> None:
    rows = documented().values()

    assert max(int(each) for row in rows for each in row.postgresql.split(", ")) == NEWEST_SERVER
    assert max(tuple(map(int, row.rabbitmq.split("."))) for row in rows) == NEWEST_BROKER
