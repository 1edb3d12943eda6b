"""Pages of a list: each names the place where the next one begins.

A place is the id of the last row, so rows that come or go meanwhile move no other row to another page.
"""

import base64
import binascii
import re

from relay.errors import UsageError
from relay.operate.asked import MAX_ID

FORM = re.compile(r"([a-z-]+):([0-9]{1,19})")


def read_cursor(kind: str, cursor: str | None) -> int | None:
    """Return the place that the cursor of such a list names; None for the first page.

    Raises:
        UsageError: it is no cursor of such a list.
    """
    if cursor is None:
        return None
    try:
        found = FORM.fullmatch(base64.urlsafe_b64decode(cursor.encode("ascii") + b"==").decode("ascii"))
    except (binascii.Error, UnicodeError, ValueError):
        found = None
    if found is None or found[1] != kind or int(found[2]) > MAX_ID:
        raise UsageError("cursor: it is not `next` of an earlier page of this list")
    return int(found[2])


def next_cursor(kind: str, places: list[int], limit: int) -> str | None:
    """Return the cursor behind the last of these places; None when the page was not full, and so the last."""
    if len(places) < limit:
        return None
    return base64.urlsafe_b64encode(f"{kind}:{places[-1]}".encode()).decode().rstrip("=")
