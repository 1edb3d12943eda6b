"""Which files go past `message_count`, `message_state` and `sent` to the tables: the engine, and those named here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEARCHED = ("relay", "spark", "demo", "examples", "tests/chaos")
OWNER = "relay/engine/"  # it moves the rows from state to state

BENEATH = {
    "a partition": re.compile(r"\bmessage_(pending|sent|parked|quarantined|discarded|archived)(?![a-z])"),
    "UPDATE": re.compile(r"\bUPDATE\s+(\{schema\}|outbox)\.message\b"),
    "SELECT": re.compile(r"\b(FROM|JOIN|TABLE)\s+(\{schema\}|outbox)\.message\b"),
    "the table's name": re.compile(r'Identifier\([^()]+, "message"'),
}

BY_NAME = "knows the outbox's own objects in the catalog by their names, and reads no row"
DAYS = "makes, drops, lists or locks days by their tables, and reads no row"
BLOCKS = "reads rows by their place in a day's table, which a view does not have"
CHANGES = "changes the state of rows, or where they go"

ALLOWED = {
    ("relay/alembic.py", "a partition"): BY_NAME,
    ("relay/errors.py", "a partition"): "names the lock that a probe shows, and reads no row",
    ("relay/operate/doctor/rights.py", "a partition"): BY_NAME,
    ("relay/operate/doctor/server.py", "a partition"): "looks at the dead rows of the hot partition",
    ("relay/operate/doctor/tables.py", "a partition"): DAYS,
    ("relay/operate/doctor/tables.py", "SELECT"): "takes the highest id by the indexes, each of which has one state",
    ("relay/operate/schema/downgrade.py", "SELECT"): "counts the rows of any version, also of one without the surfaces",
    ("relay/operate/holders.py", "a partition"): BY_NAME,
    ("relay/operate/latency.py", "SELECT"): BLOCKS,
    ("relay/operate/messages/look.py", "SELECT"): BLOCKS,
    ("relay/operate/messages/look.py", "a partition"): DAYS,
    ("relay/operate/messages/message.py", "SELECT"): BLOCKS,
    ("relay/operate/routes/quarantine.py", "UPDATE"): CHANGES,
    ("relay/operate/routes/work.py", "UPDATE"): CHANGES,
    ("relay/operate/parked/work.py", "UPDATE"): CHANGES,
    ("relay/operate/sent/selection.py", "a partition"): DAYS,
    ("relay/operate/sent/session.py", "SELECT"): BLOCKS,
    ("relay/operate/throughput.py", "SELECT"): BLOCKS,
    ("relay/operate/sent/session.py", "a partition"): "waits for marks by their lock",
    ("relay/retention/kind.py", "a partition"): DAYS,
    ("relay/testing/reading.py", "SELECT"): "deletes the rows of a test, whatever their state",
    ("spark/outbox_spark/move.py", "the table's name"): "inserts new rows",
    ("spark/outbox_spark/reading/plan.py", "a partition"): DAYS,
    ("spark/outbox_spark/reading/plan.py", "the table's name"): BLOCKS,
    ("spark/outbox_spark/reading/stream.py", "a partition"): DAYS,
    ("spark/outbox_spark/reconciling/ends.py", "the table's name"): BLOCKS,
    ("tests/chaos/server_faults.py", "a partition"): "locks the days, so that nothing is marked",
    ("tests/chaos/server_faults.py", "SELECT"): "locks the table, so that nothing is written",
}


def test_only_these_files_go_past_the_surfaces() -> None:
    files = [file for folder in SEARCHED for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".sql"}]
    texts = {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}

    found = {
        (name, what)
        for name, text in texts.items()
        for what, pattern in BENEATH.items()
        if not name.startswith(OWNER) and pattern.search(text)
    }

    assert found == set(ALLOWED)
