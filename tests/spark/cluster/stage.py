"""A stage of a write, at which a task or the driver waits or fails: `StageFault` in program.py."""

from pathlib import Path
from typing import Any

from relay.testing.servers.process import wait_for
from tests.spark.cluster.driver import Driver


class HeldStage:
    """A stage at which the first attempt at a partition, or the driver, waits for `go_on`, or fails."""

    def __init__(self, folder: Path, name: str, **fault: Any) -> None:
        folder.mkdir()
        self.fault = {"stage": name, "folder": str(folder), **fault}
        self._told, self._go = folder / name, folder / "go"

    def wait_reached(self, driver: Driver) -> int:
        """Return once a process waits at this stage: the process id of its executor.

        Raises:
            DriverError: the driver has failed before this stage.
        """
        wait_for(lambda: self._told.exists() or driver.is_answering(), f"stage {self._told.name} is reached", 120)
        if not self._told.exists():
            raise AssertionError(f"the driver came to its end past {self._told.name}: {driver.answer()}")
        return int(self._told.read_text())

    def go_on(self) -> None:
        self._go.touch()
