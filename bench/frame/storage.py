"""Where rows lie, and how they are marked: the two storages that a bench compares in one run.

A database is switched by what `relay migrate --log on` does: its engine and its tables are the product's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum

from pydantic import SecretStr

from bench.frame.servers import Servers, second_database
from relay.config.settings import DatabaseSettings
from relay.operate.log_switch import switch_log


class Storage(StrEnum):
    """Where a database keeps its rows."""

    PENDING = "pending"  # until they are sent: a mark moves each row to the table of its day
    LOG = "log"  # a mark writes receipts that name the rows, which stay where they are

    @property
    def tables(self) -> str:
        """The tables of the rows and of their marks, as VACUUM takes them."""
        return {
            Storage.PENDING: "outbox.message_pending, outbox.message_sent",
            Storage.LOG: "outbox.message_log, outbox.receipt",
        }[self]


class WhichStorage(StrEnum):
    """What `--storage` takes."""

    PENDING = "pending"
    LOG = "log"
    BOTH = "both"

    @property
    def storages(self) -> list[Storage]:
        return list(Storage) if self is WhichStorage.BOTH else [Storage(self)]


def use(storage: Storage, database_url: str) -> None:
    """Send the new rows of a database there."""
    if storage is Storage.LOG:
        switch_log(DatabaseSettings(url=SecretStr(database_url)), on=True)


@contextmanager
def stored(servers: Servers, which: WhichStorage) -> Iterator[dict[Storage, Servers]]:
    """Return servers of each storage: a database for each, on the same server."""
    with second_database(servers, "log") if Storage.LOG in which.storages else nullcontext(servers) as log:
        found = {Storage.PENDING: servers, Storage.LOG: log}
        for storage in which.storages:
            use(storage, found[storage].database_url)
        yield {storage: found[storage] for storage in which.storages}
