"""The reference to measure against: a C client that publishes the same messages and knows no database."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.frame.backlog import AGGREGATE_TYPE, EVENT_TYPE, PAYLOAD_BYTES, Backlog
from bench.frame.error import BenchmarkError
from bench.frame.queue import EXCHANGE

NAME = "C client"
SOURCE = Path(__file__).parents[1] / "publish.c"
APP_ID = "outbox-relay"  # the relay's default
HEADERS = (Path("/usr/include/amqp.h"), Path("/usr/include/rabbitmq-c/amqp.h"))  # before and since release 0.12
WINDOW = 1000  # messages unconfirmed at a time; a larger window costs the broker more CPU a message


class ReferenceClientError(BenchmarkError):
    """The C client cannot be built or did not publish everything."""


@dataclass(frozen=True, slots=True)
class PublishFigures:
    """What the C client measured, from its first publish to its last confirm."""

    messages: int
    seconds: float
    cpu_seconds: float


def is_buildable() -> bool:
    """Whether this machine has a C compiler and librabbitmq."""
    return shutil.which("cc") is not None and any(header.exists() for header in HEADERS)


def build(folder: Path) -> Path:
    """Compile the client into `folder` and give the program.

    Raises:
        ReferenceClientError: there is no C compiler or no librabbitmq.
    """
    if not is_buildable():
        raise ReferenceClientError("the C client needs a compiler and librabbitmq: `sudo tests/support/packages bench`")
    program = folder / "publish"
    command = ["cc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(SOURCE), "-lrabbitmq"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ReferenceClientError(f"the C client does not compile:\n{done.stderr}")
    return program


def publish(program: Path, broker_url: str, backlog: Backlog) -> PublishFigures:
    """Publish all rows of a backlog, with at most WINDOW unconfirmed.

    Raises:
        ReferenceClientError: a message was refused or returned, or the connection was lost.
    """
    route = [EXCHANGE, AGGREGATE_TYPE, EVENT_TYPE, APP_ID]
    with backlog.list_file.open("rb") as rows:
        done = subprocess.run(
            [program, broker_url, *route, str(PAYLOAD_BYTES), str(WINDOW)],
            check=False,
            stdin=rows,
            capture_output=True,
            text=True,
            timeout=600,
        )
    if done.returncode:
        raise ReferenceClientError(done.stderr.strip() or f"the C client ended with code {done.returncode}")
    return PublishFigures(**json.loads(done.stdout))
