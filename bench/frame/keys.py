"""Whose rows they are: keys drawn as customers buy in the CDNOW file, or a single one."""

import random
from enum import StrEnum
from functools import cache

from tests.support.purchases import purchases

HOT_KEY = "00001"


class Keys(StrEnum):
    """How the rows of a backlog spread over ordering keys."""

    CDNOW = "cdnow"  # 23,570 customers, some with hundreds of purchases
    HOT = "hot"  # all rows have one key: the worst case for order per key


def draw(keys: Keys, count: int, seed: int) -> list[str]:
    """Draw `count` keys; the same seed gives the same ones.

    With `CDNOW` each key is the customer of one of the file's purchases, drawn with replacement: a customer
    comes as often as they bought, and a key's rows lie scattered among the others' as they do in time.
    """
    if keys is Keys.HOT:
        return [HOT_KEY] * count
    return random.Random(seed).choices(_customers(), k=count)


@cache
def _customers() -> list[str]:
    """Give the customer of each purchase."""
    return [line.split()[0] for line in purchases().read_text(encoding="ascii").splitlines()[1:]]
