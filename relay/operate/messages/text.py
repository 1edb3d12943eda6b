"""What messages say as text that people read: JSON by lines, bytes as hex, and what differs between two texts.

JSON is never parsed into values: a number keeps its digits, and a name that comes twice stays twice.
"""

import difflib
import re
from dataclasses import dataclass

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
DEEPEST = 20  # levels that are indented: text of a thousand levels would grow by its square
# They turn the text around them, or do not show. JSON can say them by their numbers.
UNSEEN = re.compile("[\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
IN_LINE = 16  # bytes
MOST_CHANGES = 400  # lines of a difference


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload as text.

    Attributes:
        kind: "JSON", "text" or "bytes".
        is_whole: whether nothing was left out behind it.
    """

    kind: str
    text: str
    is_whole: bool


def shown(payload: str | None, payload_bytes: bytes | None, *, is_whole: bool) -> Shown:
    """Return a payload as text: JSON indented if it is whole, text as it is, other bytes as hex."""
    if payload is not None:
        return Shown("JSON", indented(payload) if is_whole else payload, is_whole)
    data = payload_bytes or b""
    text = text_of(data, is_whole=is_whole)
    return Shown("bytes", hex_dump(data), is_whole) if text is None else Shown("text", text, is_whole)


def text_of(data: bytes, *, is_whole: bool = True) -> str | None:
    """Return bytes as text if they are UTF-8 that can be read. None: they are not."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if is_whole or error.start < len(data) - 3:
            return None
        text = data[: error.start].decode()  # a character that was cut
    return None if NOT_TEXT.search(text) else text


def indented(text: str) -> str:
    """Return JSON with a line for each member and item, and what would not show as `\\u202e`."""
    parts: list[str] = []
    depth, before = 0, ""
    for token in TOKEN.findall(text):
        if token in ("}", "]"):
            depth -= 1
            parts.append(token if before in ("{", "[") else _line(depth) + token)
        else:
            if before in ("{", "[", ","):
                parts.append(_line(depth))
            elif before == ":":
                parts.append(" ")
            parts.append(UNSEEN.sub(_escaped, token) if token[0] == '"' else token)
            depth += token in ("{", "[")
        before = token
    return "".join(parts)


def hex_dump(data: bytes) -> str:
    """Return bytes in lines of sixteen: where they are, their hex digits, and those that are ASCII."""
    return "\n".join(_hex_line(data, start) for start in range(0, len(data), IN_LINE))


def changes(old: str, new: str) -> list[str]:
    """Return the lines that differ, each with `-` or `+` before it, and a few around them."""
    lines = [*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)][2:]
    if len(lines) <= MOST_CHANGES:
        return lines
    return [*lines[:MOST_CHANGES], f"@@ {len(lines) - MOST_CHANGES} more lines @@"]


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, DEEPEST)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _hex_line(data: bytes, start: int) -> str:
    line = data[start : start + IN_LINE]
    digits = f"{line[:8].hex(' '):<23}  {line[8:].hex(' '):<23}"
    letters = "".join(chr(each) if 0x20 <= each < 0x7F else "." for each in line)
    return f"{start:08x}  {digits}  {letters}"
