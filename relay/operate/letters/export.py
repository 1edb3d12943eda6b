"""Save dead letters in a file of JSON Lines, which is there whole or not at all; they stay in their queue."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import orjson

from relay.config.settings import BrokerSettings
from relay.errors import UsageError
from relay.observe.printable import printable_json
from relay.operate.letters.document import document
from relay.operate.letters.letter import Held, LetterSelection
from relay.operate.letters.read import Read, read_letters


async def export(broker: BrokerSettings, queue: str, selection: LetterSelection, file: IO[bytes]) -> Read:
    """Write each letter that is meant as a line; raises as `queue.opened`."""

    def write(held: Held) -> None:
        file.write(printable_json(orjson.dumps(document(held), option=orjson.OPT_APPEND_NEWLINE).decode()).encode())

    return await read_letters(broker, queue, selection, write)


@contextmanager
def written_whole(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Yield a file that has its name, and is on the disk, once the block has ended well; else there is no file.

    Raises:
        UsageError: there is one already, or it cannot be written.
    """
    if not overwrite and path.exists():
        raise UsageError(f"{path} exists: name another file, or add --overwrite")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if overwrite:
                    os.replace(file.name, path)
                else:
                    os.link(file.name, path)  # fails when another process has made one meanwhile
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
