"""Text from other systems on a terminal: rows, headers, the broker's texts and exceptions must not move its cursor.

Characters that Python calls not printable are escaped: control characters (C0, C1, DEL) and the marks that turn the
direction of text. So are line separators, characters without a glyph, and halves of surrogate pairs.
"""

import re
from datetime import UTC, datetime

UNPRINTABLE = re.compile(r"[^ -~]")


def printable(value: object) -> str:
    """Return a value as one line without characters that a terminal acts on; `None` is empty."""
    text = "" if value is None else value if isinstance(value, str) else str(value)
    return text if text.isprintable() else UNPRINTABLE.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, such as a traceback, escaped as by `printable`; line breaks stay, tabs do not."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def printable_json(document: str) -> str:
    """Return a JSON document of the same value, in which only line breaks are not printable."""
    return UNPRINTABLE.sub(_escaped_in_json, document)


def utc(moment: datetime) -> str:
    """Return a moment as commands print it: `2026-11-21 08:00:00Z`."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _escaped_in_json(found: re.Match[str]) -> str:
    char = found[0]
    if char == "\n" or char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
