"""The lane of an ordering key, as the table's generated column computes it."""

from functools import lru_cache

WORD = 0xFFFFFFFF
KEYS_CACHED = 10_000
# Each step: the word to change, the word that is subtracted and rotated, by how many bits, and the word that is added.
STEPS = ((0, 2, 4, 1), (1, 0, 6, 2), (2, 1, 8, 0), (0, 2, 16, 1), (1, 0, 19, 2), (2, 1, 4, 0))
LAST_STEPS = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))


@lru_cache(KEYS_CACHED)
def lane_of(aggregate_type: bytes, aggregate_id: bytes) -> int:
    """Return the lane, 0-15, that PostgreSQL computes for a row of this key.

    Source:
        migrations/versions/0001_outbox.py, column `lane`: the low bits of hashtextextended(..., 0), which is
        hash_bytes_extended in PostgreSQL's src/common/hashfn.c (Bob Jenkins' lookup3, little-endian).
        tests/publisher/test_lane.py compares both.
    """
    return _hash(aggregate_type + b"/" + aggregate_id) & 15


def _hash(data: bytes) -> int:
    words = [0x9E3779B9 + len(data) + 3923095 & WORD] * 3
    whole = len(data) // 12 * 12
    for start in range(0, whole, 12):
        _add(words, data[start : start + 12])
        for of, by, bits, to in STEPS:
            words[of] = (words[of] - words[by] & WORD) ^ _turned(words[by], bits)
            words[by] = words[by] + words[to] & WORD
    rest = data[whole:]
    # lookup3 reserves the lowest byte of the third word for the length.
    _add(words, rest[:8] + b"\0" + rest[8:] if len(rest) > 8 else rest)
    for of, by, bits in LAST_STEPS:
        words[of] = (words[of] ^ words[by]) - _turned(words[by], bits) & WORD
    return words[2]


def _add(words: list[int], data: bytes) -> None:
    for n in range(3):
        words[n] = words[n] + int.from_bytes(data[4 * n : 4 * n + 4], "little") & WORD


def _turned(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & WORD
