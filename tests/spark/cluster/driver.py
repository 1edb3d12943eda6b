"""A Spark driver as a separate process, which does what a test tells it: tests/spark/cluster/program.py."""

import json
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from relay.testing.servers.process import Process
from tests.spark.frames import MADE_INVOICES
from tests.support.spark_cluster import OF_DRIVERS, environment, package_zip, python_with

PROGRAM = Path(__file__).with_name("program.py")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",  # one on each worker: there is room for a second driver
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10",  # so that a partition of 25 rows has several batches
}
# As lines of JSON, in one file: what Spark itself notes of executors, stages and attempts.
EVENT_LOG = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


class DriverError(Exception):
    """A function of the driver has failed; the message has the reason."""


class Driver:
    """A Spark session on this master, which gets the package by `--py-files`."""

    def __init__(self, folder: Path, master: str, **settings: str) -> None:
        self.folder = folder
        self._events = folder / "events"
        self._events.mkdir(parents=True)
        self._master = master
        self._settings = {**SETTINGS, **EVENT_LOG, "spark.eventLog.dir": self._events.as_uri(), **settings}
        self._is_asked = False

    def __enter__(self) -> Self:
        given = [f"--conf {key}={value}" for key, value in self._settings.items()]
        submit = ["--master", self._master, "--py-files", str(package_zip(self.folder)), *given, "pyspark-shell"]
        python = python_with(self.folder / "python", OF_DRIVERS)
        with Listener(str(self.folder / "socket")) as listener:
            self._process = Process(
                [python, PROGRAM, self.folder / "socket"],
                log=self.folder / "log",
                environment={**environment(python, self.folder), "PYSPARK_SUBMIT_ARGS": " ".join(submit)},
                folder=self.folder,
            )
            try:
                listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]  # else it waits for a dead one
                self._program: Connection[Any, Any] = listener.accept()
                self._program.recv()
            except BaseException:
                self.kill()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def tell(self, name: str, **arguments: Any) -> None:
        """Start one of the driver's functions, after any that a failed test has left running."""
        if self._is_asked:
            with suppress(DriverError):
                self.answer()
        self._is_asked = True
        self._program.send((name, arguments))

    def is_answering(self) -> bool:
        return self._program.poll()

    def answer(self, within: float = 120) -> Any:
        """Return the result of the function.

        Raises:
            DriverError: the function failed.
            TimeoutError: the function still runs.
        """
        if not self._program.poll(within):
            raise TimeoutError(f"the driver is still at it after {within:g} s\n{self._process.log_end()}")
        value, failed = self._program.recv()
        self._is_asked = False
        if failed is not None:
            raise DriverError(failed)
        return value

    def do(self, name: str, **arguments: Any) -> Any:
        """Run one of the driver's functions, and return its result."""
        self.tell(name, **arguments)
        return self.answer()

    def save(
        self,
        options: Mapping[str, str],
        fault: Mapping[str, Any] | None = None,
        partitions: int = 4,
        *,
        is_shuffled: bool = False,
    ) -> None:
        """Start to write 100 invoices.

        Args:
            is_shuffled: the partitions come of a shuffle, of which an executor has a part.
        """
        hint = f"/*+ REPARTITION({partitions}, invoice_id) */" if is_shuffled else ""
        rows = f"SELECT {hint} * FROM ({_invoices(partitions)})"
        self.tell("save", rows=rows, options=dict(options), fault=fault and dict(fault))

    def save_several(self, options: Mapping[str, str], fault: Mapping[str, Any] | None = None) -> None:
        """Start to write the same invoices as `save`, by OutboxBatch."""
        self.tell("several", rows=_invoices(4), options=dict(options), fault=fault and dict(fault))

    def happened(self, *names: str) -> list[dict[str, Any]]:
        """Return what Spark has noted of these events so far, such as ExecutorAdded; tasks appear with their stage."""
        (log,) = self._events.iterdir()
        whole_lines = log.read_text().rpartition("\n")[0].splitlines()
        events = [json.loads(line) for line in whole_lines]
        return [event for event in events if event["Event"] in {f"SparkListener{name}" for name in names}]

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """Kill the driver, its JVM and their children with SIGKILL; the cluster's executors live on."""
        self._process.stop(signal.SIGKILL)


def _invoices(partitions: int) -> str:
    return MADE_INVOICES.format(count=100, partitions=partitions)
