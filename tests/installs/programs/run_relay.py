"""Carry a row by the command, from the migration to the end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg

database, broker = sys.argv[1:]
relay = Path(sys.executable).parent / "relay"
os.environ |= {"RELAY_DATABASE_URL": database, "RELAY_BROKER_URL": broker}
subprocess.run([relay, "migrate"], check=True)
subprocess.run([relay, "status"], check=True)
with psycopg.connect(database, autocommit=True) as connection:
    connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'Said', '{}')"
    )
    process = subprocess.Popen([relay, "run"])
    give_up_at = time.monotonic() + 60
    while connection.execute("SELECT count(*) FROM outbox.message WHERE state = 'sent'").fetchone() != (1,):
        assert process.poll() is None, "relay run ended"
        assert time.monotonic() < give_up_at, "the row is not sent"
        time.sleep(0.05)
process.terminate()
assert process.wait() == 0
