"""A terminal, and the characters that must not reach it."""

import io

# C0, ESC, BEL, DEL, C1, CSI as one byte, marks that turn the direction of text, line separators, half a surrogate pair.
UNPRINTABLE = "\x00\x07\x08\r\x1b[2J\x1b]0;title\x07\x7f\x85\x9b31m\u202e\u2066\u200f\u061c\u2028\u2029\ufeff\ud800"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True
