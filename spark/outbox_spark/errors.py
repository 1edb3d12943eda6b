"""What can go wrong with a write or a read, as one tree; Spark wraps them, and `reason` finds them in its words.

OutboxWriteError
  OptionError          an option is unknown, missing or cannot be
  SparkReleaseError    this release of Spark has no such feature
  TableError           a table is missing, or may not be written
  ColumnError          the DataFrame does not fit the tables
  RowError             a value that the database would refuse; its row is named
  BatchError           the batch cannot be committed; nothing of it is in the tables, but pieces that are written stay
  CommitUnknownError   the connection broke while the commit was under way
  ReadError            the database cannot give all that was planned to be read
  ArchiveError         a day cannot be archived; it is not noted as such
"""

import re

OURS = re.compile(r"^\s*(?:\S*: )?outbox_spark\.errors\.(\w+): (.*)$", re.MULTILINE)


class OutboxWriteError(Exception):
    """Base of every error of this package."""


class OptionError(OutboxWriteError):
    """An option cannot be used; refused before any task runs."""


class SparkReleaseError(OutboxWriteError):
    """This release of Spark lacks what was asked for; the message names the one that has it."""


class TableError(OutboxWriteError):
    """A table is missing or may not be written; refused before any task runs."""


class ColumnError(OutboxWriteError):
    """The DataFrame's columns do not fit; refused before any task runs, every column named."""


class RowError(OutboxWriteError):
    """A row that the database would refuse, so the batch is not written.

    Attributes:
        place: among the rows at hand; None when a Python function refused it, which may do better at another try.
        fault: what is wrong, without the name of the row.
    """

    def __init__(self, message: str, *, place: int | None = None, fault: str = "") -> None:
        super().__init__(message)
        self.place = place
        self.fault = fault


class BatchError(OutboxWriteError):
    """The batch cannot be committed; of one in pieces, those that are written stay."""


class CommitUnknownError(OutboxWriteError):
    """The database did not answer whether the transaction is committed; run the same batch again to find out."""


class ReadError(OutboxWriteError):
    """Not all that was planned to be read is there, or it cannot be read; fails its task, so nothing is missing."""


class ArchiveError(OutboxWriteError):
    """A day cannot be archived, or its archive is not what the table has; it is not noted, and may be run again."""


def reason(error: BaseException) -> str | None:
    """Return the one line of this package in an exception of Spark; None when the fault is another."""
    if isinstance(error, OutboxWriteError):
        return str(error)
    found = OURS.search(str(error))
    return None if found is None else found.group(2).strip()


def one_line(error: BaseException) -> str:
    """Return what an error says without its line breaks."""
    return " ".join(str(error).split())
