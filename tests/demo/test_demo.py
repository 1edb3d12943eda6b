"""The demo as its reader runs it, on few purchases."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.process import free_port, wait_for
from tests.demo.processes import processes_of, started

PURCHASES = 500
UNREADABLE = " 00007 19970199  1   10.00\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in place of .demo/, and in it a file of purchases."""
    with temporary_folder() as folder:
        lines = [
            f" {n % 90:05d} 1997{n % 12 + 1:02d}{n % 28 + 1:02d}  2   {n}.{n % 100:02d}\n" for n in range(PURCHASES)
        ]
        (folder / "purchases.txt").write_text(
            " customer_id  date number_of_cds  dollar_value\n" + "".join(lines) + UNREADABLE
        )
        yield folder


def start(place: Path, *options: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the demo in that folder until the end of the block."""
    own = {"DEMO_FOLDER": str(place), "COLUMNS": "120", **variables}
    return started("demo", "--input", place / "purchases.txt", *options, **own)


def row(output: str, name: str) -> list[str]:
    """Return the two counts of a row of the reconciliation."""
    found = re.search(rf"^│ {name} +│ +([\d,.]*) │ +([\d,]*) │", output, re.MULTILINE)
    assert found, f"no row {name!r} in:\n{output}"
    return list(found.groups())


@pytest.mark.drills
@pytest.mark.timeout(300)
def test_it_adds_up_and_a_second_run_recognises_the_batch(place: Path) -> None:
    """The demo runs twice; its second run writes nothing again, and what it replays is absorbed."""
    with start(place) as first:
        said_first = first.communicate()[0]
    with start(place) as second:
        said_second = second.communicate()[0]

    assert (first.returncode, second.returncode) == (0, 0), said_first + said_second
    assert row(said_first, "quarantined") == ["1", "1"]
    assert row(said_first, "projected") == ["500", "500"]
    assert row(said_second, "invoices") == ["500", "0"]
    assert row(said_second, "confirmed") == ["500", "0"]
    assert row(said_first, "replayed") == ["6", "6"]  # the purchases of customer 00000
    assert row(said_second, "replayed") == ["12", "6"]
    assert row(said_first, "duplicates absorbed") == row(said_second, "duplicates absorbed") == ["", "6"]
    assert "recognised, nothing written" in said_second
    wait_for(lambda: processes_of(place) == [], "every process of the demo is gone", 10)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("during", ["PostgreSQL", pytest.param("a consumer", marks=pytest.mark.drills)])
def test_ctrl_c_leaves_no_process(place: Path, during: str) -> None:
    """Ctrl-C interrupts the demo; every process that it started ends."""
    with start(place) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if during in line:
                break

        demo.send_signal(signal.SIGINT)
        said = demo.communicate()[0]

    assert demo.returncode == 130, said
    assert "nothing is left running" in said
    wait_for(lambda: processes_of(place) == [], "every process of the demo is gone", 10)


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_it_adds_up_on_the_reader_s_own_servers_and_leaves_them_full(
    place: Path, database_url: str, broker_url: str
) -> None:
    own = {"RELAY_DATABASE_URL": database_url, "RELAY_BROKER_URL": broker_url}
    settings_of_a_relay = {"RELAY_DATABASE_SCHEMA": "events", "RELAY_LOG_LEVEL": "error"}
    with start(place, **own, **settings_of_a_relay) as demo:
        said = demo.communicate()[0]
    with start(place, "--fresh", **own) as fresh:
        refused = fresh.communicate()[0]

    assert (demo.returncode, fresh.returncode) == (0, 1), said + refused
    assert row(said, "projected") == ["500", "500"]
    assert "private" not in said
    assert "FRESH=1 does not empty your own servers" in refused
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM billing.invoice_projection").fetchone() == (PURCHASES,)
    wait_for(lambda: processes_of(place) == [], "every process of the demo is gone", 10)


def test_a_server_of_the_reader_that_does_not_answer_is_named(place: Path, database_url: str) -> None:
    nobody = f"127.0.0.1:{free_port()}"

    with start(place, RELAY_DATABASE_URL=f"postgresql://{nobody}/demo", RELAY_BROKER_URL=f"amqp://{nobody}/") as demo:
        without_database = demo.communicate()[0]
    with start(place, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=f"amqp://{nobody}/") as demo:
        without_broker = demo.communicate()[0]

    assert re.search(r"✗ .*refused.*; check RELAY_DATABASE_URL$", without_database, re.MULTILINE), without_database
    assert re.search(r"✗ .*; check RELAY_BROKER_URL$", without_broker, re.MULTILINE), without_broker
    assert "error when creating transport" not in without_broker
