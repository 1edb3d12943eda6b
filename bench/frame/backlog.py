"""Rows to drain: written into a file once, and from there into the table again and again."""

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import orjson
import psycopg

from tests.support.purchases import purchases

AGGREGATE_TYPE = "invoice"
EVENT_TYPE = "InvoiceIssued"
ROUTING_KEY = f"{AGGREGATE_TYPE}.{EVENT_TYPE}"
PAYLOAD_BYTES = 512
SEED = 1997
HOT_KEY = "00001"

EMPTY = "TRUNCATE outbox.message"
START_IDS_AGAIN = "ALTER SEQUENCE outbox.message_id_seq RESTART"

FILL = """
    COPY outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload) FROM STDIN
"""

# What the C client needs to send the very same messages.
LIST_ROWS = """
    COPY (SELECT id, lane, message_id, aggregate_id, written_as FROM outbox.message_pending ORDER BY id) TO STDOUT
"""

# The insert's own ring may have found the relay awake for a poll: rung again, so that it always wakes up at once.
RING = "SELECT pg_notify('outbox.doorbell', '')"


class Keys(StrEnum):
    """How the rows of a backlog spread over ordering keys."""

    CDNOW = "cdnow"  # 23,570 customers, some with hundreds of purchases
    HOT = "hot"  # all rows have one key: the worst case for order per key


@dataclass(frozen=True, slots=True)
class Backlog:
    """The same rows for every round: to be copied from `table_file`, and listed for the C client in `list_file`."""

    keys: Keys
    rows: int
    table_file: Path
    list_file: Path


def prepare(database_url: str, folder: Path, keys: Keys, rows: int) -> Backlog:
    """Draw the rows and write both files; the table is left empty."""
    backlog = Backlog(keys, rows, folder / f"{keys}.copy", folder / f"{keys}.rows")
    numbers = random.Random(SEED)
    with backlog.table_file.open("wb") as file:
        for number, customer in enumerate(_draw(keys, rows, SEED), start=1):
            message_id = uuid.UUID(int=numbers.getrandbits(128), version=4)
            head = f"{message_id}\t{AGGREGATE_TYPE}\t{customer}\t{EVENT_TYPE}\t".encode()
            file.write(head + _payload(number, customer, numbers) + b"\n")

    empty(database_url, same_ids=True)
    with uncommitted(database_url, backlog) as connection:
        with connection.cursor().copy(LIST_ROWS) as listed, backlog.list_file.open("wb") as file:
            for block in listed:
                file.write(block)
        connection.rollback()
    return backlog


def empty(database_url: str, *, same_ids: bool) -> None:
    """Remove all rows.

    `same_ids`: start at 1 again, as the rows for the C client have them. Not while a relay runs: it has seen
    higher ids, and would take the new rows for late commits.
    """
    with psycopg.connect(database_url) as connection:
        connection.execute(EMPTY)
        if same_ids:
            connection.execute(START_IDS_AGAIN)


@contextmanager
def uncommitted(database_url: str, backlog: Backlog) -> Iterator[psycopg.Connection]:
    """Fill the table in a transaction that is still open when it is handed over.

    So the whole backlog becomes visible at one moment, which the caller chooses: its `commit()`.
    """
    with psycopg.connect(database_url) as connection:
        with connection.cursor().copy(FILL) as copy, backlog.table_file.open("rb") as file:
            while block := file.read(1 << 20):
                copy.write(block)
        connection.execute(RING)
        yield connection


def _payload(number: int, customer: str, numbers: random.Random) -> bytes:
    """Return an invoice as JSON of exactly PAYLOAD_BYTES."""
    invoice = {"invoice": f"CDNOW-{number:07}", "customer": customer, "cents": numbers.randrange(100, 20_000)}
    bare = orjson.dumps({**invoice, "note": ""})
    return bare[:-2] + b"n" * (PAYLOAD_BYTES - len(bare)) + bare[-2:]


def _draw(keys: Keys, count: int, seed: int) -> list[str]:
    """Draw `count` keys; the same seed gives the same ones.

    With `CDNOW` each key is the customer of one of the file's purchases, drawn with replacement. A customer
    comes as often as they bought, and a key's rows lie scattered among the others' as they do in time.
    """
    if keys is Keys.HOT:
        return [HOT_KEY] * count
    return random.Random(seed).choices(_customers(), k=count)


@cache
def _customers() -> list[str]:
    """Return the customer of each purchase."""
    return [line.split()[0] for line in purchases().read_text(encoding="ascii").splitlines()[1:]]
