"""Files that can be read once."""

import os
from pathlib import Path


def piped(text: str) -> Path:
    """Return the path of a pipe that holds the text, such as a shell makes for `<(echo text)`."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return Path(f"/dev/fd/{reader}")
