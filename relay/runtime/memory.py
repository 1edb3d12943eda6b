"""How much memory this process may have, and how much of it the relay may fill with rows.

The figures were measured with payloads of 150 KB, 1 MB and 16 MB, while the broker stood still (docs/container.md).
"""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

MIB = 1024 * 1024
RESIDENT = (81 if sys.version_info >= (3, 14) else 70) * MIB  # of a relay that carries nothing
RESERVED = 230 * MIB  # address space beyond what is resident: libraries, stacks, arenas of malloc
WINDOW_COST = 1.25  # resident bytes for each byte of a window: the rows, and the part that a read brings
LARGEST_KEPT = 1.75  # for each byte of the largest row: libpq's buffer, which grows to that size and stays
LARGEST_COST = 3.25  # for each byte of such a row on its way: libpq's buffer, its result, then the row and its frames
ALONE_SHARE = 0.25  # of the window: what may be under way next to a row that hardly fits into the window
MOST_WINDOW = 64 * MIB
LEAST_WINDOW = MIB

UNIFIED_FILES = ("memory.max", "memory.high")
V1_FILES = ("memory.limit_in_bytes",)
M_MMAP_THRESHOLD = -3  # of mallopt(3)


class Limit(NamedTuple):
    """A limit of this process's memory."""

    size: int  # bytes that may be resident
    source: str  # what sets it, for an operator


def memory_limit(root: Path = Path("/")) -> Limit:
    """Return the lowest limit: of a control group on the way up, of the address space, or the machine's memory.

    Args:
        root: where /proc and the control groups are mounted.
    """
    limits = [Limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory")]
    limits += (Limit(size, str(file)) for file, size in _of_groups(root))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(Limit(max(0, address_space - RESERVED), f"RLIMIT_AS of {mib(address_space)}"))
    return min(limits)


def window_within(limit: int, largest: int) -> int:
    """Return the bytes of a window that stays within `limit`, when a message has `largest` bytes at most."""
    left = limit - RESIDENT
    beside_largest = (left - LARGEST_COST * largest) / ALONE_SHARE
    full = (left - LARGEST_KEPT * largest) / WINDOW_COST
    return int(min(max(LEAST_WINDOW, min(beside_largest, full)), MOST_WINDOW))


def needed(window: int, largest: int) -> int:
    """Return how much memory a relay takes at most that carries such messages in such a window."""
    full = WINDOW_COST * window + LARGEST_KEPT * largest
    beside_largest = ALONE_SHARE * window + LARGEST_COST * largest
    return int(RESIDENT + max(full, beside_largest))


def beside(size: int, window: int, largest: int) -> float:
    """Return how many bytes of other rows may be under way while a row of `size` bytes is read, within `needed`."""
    return max(ALONE_SHARE * window, min(window - size, window + LARGEST_KEPT * largest - LARGEST_COST * size))


def largest_within(limit: int) -> int:
    """Return the bytes of the largest message that a relay can carry within `limit`; 0: no message is small enough."""
    return max(0, int((limit - needed(LEAST_WINDOW, 0)) / LARGEST_COST))


def mib(size: float) -> str:
    return f"{ceil(size / MIB):,} MiB"


def size_words(count: int) -> str:
    """Return a number of bytes in its largest unit: 200 bytes, 1.5 KiB, 64 MiB."""
    for unit, word in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f}".removesuffix(".0") + f" {word}"
    return f"{count:,} {'byte' if count == 1 else 'bytes'}"


def return_large_blocks() -> None:
    """Let malloc give blocks of 1 MiB and more back to the system as soon as they are freed.

    glibc raises its threshold up to 32 MiB with the blocks that it sees, and keeps what is smaller. So 15 MiB more
    stayed resident with payloads of 1 MB, and 14 MiB with such of 16 MB.
    """
    with suppress(AttributeError):  # a C library that has no such threshold
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)


def collect_rarely() -> None:
    """Let the garbage collector look less often, in a process that carries rows.

    Thousands of rows live for milliseconds each, and are in no cycle. At its usual pace the collector finds nothing
    among them, and costs a tenth of the relay's CPU time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _of_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each limit of the control groups of this process, from its own up to the topmost that is mounted."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            place, _, kind = mount.partition(" - ")
            system, _, options = kind.split(" ", 2)
            if system != ("cgroup" if controllers else "cgroup2"):
                continue
            if controllers and "memory" not in options.split(","):
                continue
            mounted, point = place.split(" ")[3:5]
            # A container sees its own group as the root of the mount, under whatever path the host has it.
            below = Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else Path()
            yield from _up(root / point.lstrip("/"), below, V1_FILES if controllers else UNIFIED_FILES)


def _up(top: Path, below: Path, files: tuple[str, ...]) -> Iterator[tuple[Path, int]]:
    for folder in (below, *below.parents):
        for name in files:
            file = top / folder / name
            try:
                text = file.read_text().strip()
            except OSError:  # the topmost group has no such file, nor one that is outside of our view
                continue
            if text.isdigit():  # else "max"
                yield file, int(text)
