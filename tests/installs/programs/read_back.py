"""Migrate a database, and read in a transaction what was written in it, without the command `relay`."""

import sys

import psycopg

from relay.outbox import Event, add
from relay.testing import Outbox, capture, template_database

server = sys.argv[1]
with template_database(server) as database, psycopg.connect(database) as connection, capture() as events:
    add(connection, Event("customer", "17", "InvoiceIssued", {"invoice": 42}))
    written = Outbox(connection).assert_written("InvoiceIssued", key="17", payload={"invoice": 42}, count=1)
    assert [written] == events
    assert written.payload(dict[str, int]) == {"invoice": 42}
