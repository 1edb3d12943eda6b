"""The memory limit is found where the kernel tells it, and the window stays within it."""

from pathlib import Path

import pytest

from relay.runtime.memory import LEAST_WINDOW, MIB, MOST_WINDOW, memory_limit, needed, window_within

V1 = "40 25 0:30 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
UNIFIED = "29 25 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


class Machine:
    """Files as the kernel shows them to a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_control_group_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path).source == "the machine's memory"


def test_the_lowest_limit_on_the_way_up_counts(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", UNIFIED.format(root="/"))
    machine.put("proc/self/cgroup", "0::/pods/pod7/relay\n")
    machine.put("sys/fs/cgroup/pods/pod7/relay/memory.max", "max\n")
    machine.put("sys/fs/cgroup/pods/pod7/memory.max", f"{128 * MIB}\n")
    machine.put("sys/fs/cgroup/pods/memory.max", f"{512 * MIB}\n")

    found = memory_limit(machine.folder)

    assert found.size == 128 * MIB
    assert found.source.endswith("/sys/fs/cgroup/pods/pod7/memory.max")


def test_where_the_kernel_begins_to_throttle_is_a_limit(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", UNIFIED.format(root="/"))
    machine.put("proc/self/cgroup", "0::/relay\n")
    machine.put("sys/fs/cgroup/relay/memory.max", f"{256 * MIB}\n")
    machine.put("sys/fs/cgroup/relay/memory.high", f"{200 * MIB}\n")

    assert memory_limit(machine.folder).size == 200 * MIB


def test_a_container_sees_its_group_as_the_root_of_the_mount(machine: Machine) -> None:
    machine.put(
        "proc/self/mountinfo", "a line of another file system - ext4 /dev/vda rw\n" + V1.format(root="/docker/4f")
    )
    machine.put("proc/self/cgroup", "5:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n0::/\n")
    machine.put("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{96 * MIB}\n")

    assert memory_limit(machine.folder).size == 96 * MIB


def test_a_group_outside_of_our_view_leaves_the_topmost_that_we_see(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", UNIFIED.format(root="/../.."))
    machine.put("proc/self/cgroup", "0::/../elsewhere\n")
    machine.put("sys/fs/cgroup/memory.max", f"{96 * MIB}\n")

    assert memory_limit(machine.folder).size == 96 * MIB


def test_version_1_says_that_there_is_none_by_a_number_above_any_memory(machine: Machine) -> None:
    machine.put("proc/self/mountinfo", V1.format(root="/"))
    machine.put("proc/self/cgroup", "4:memory:/relay\n")
    machine.put("sys/fs/cgroup/memory/relay/memory.limit_in_bytes", "9223372036854771712\n")

    assert memory_limit(machine.folder).source == "the machine's memory"


@pytest.mark.parametrize("limit", [96, 128, 160, 256, 1024])
@pytest.mark.parametrize("largest", [1, 16, 64])
def test_the_window_fits_wherever_one_message_does(limit: int, largest: int) -> None:
    window = window_within(limit * MIB, largest * MIB)

    assert LEAST_WINDOW <= window <= MOST_WINDOW
    if needed(LEAST_WINDOW, largest * MIB) <= limit * MIB:
        assert needed(window, largest * MIB) <= limit * MIB
