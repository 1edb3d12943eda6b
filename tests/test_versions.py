"""The doctor tells what is newer than the newest that docs/versions.md names, and compose starts nothing newer."""

import re
from pathlib import Path

from relay.operate.doctor.broker_hosts import NEWEST_BROKER
from relay.operate.doctor.server import NEWEST_SERVER
from tests.support.versions import documented

ROOT = Path(__file__).parents[1]


def test_the_doctor_knows_the_newest_of_the_table() -> None:
    rows = documented().values()

    assert max(int(each) for row in rows for each in row.postgresql.split(", ")) == NEWEST_SERVER
    assert max(tuple(map(int, row.rabbitmq.split("."))) for row in rows) == NEWEST_BROKER


def test_compose_starts_servers_that_are_tested() -> None:
    """A tag such as `rabbitmq:4` would start a release that came out today."""
    named = re.findall(r"image: \$\{(\w+)_IMAGE:-\w+:([\d.]+)\}", (ROOT / "config" / "compose.yaml").read_text())
    rows = documented().values()

    assert {server for server, _ in named} == {"POSTGRES", "RABBITMQ"}
    assert {tag for server, tag in named if server == "POSTGRES"} <= {
        each for row in rows for each in row.postgresql.split(", ")
    }
    assert {tag for server, tag in named if server == "RABBITMQ"} <= {row.rabbitmq for row in rows}
