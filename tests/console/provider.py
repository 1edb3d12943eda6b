"""A real OpenID Connect provider, from requirements/provider.txt, in a separate environment."""

import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from relay.testing.servers.process import free_port

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "provider.txt"
ENVIRONMENT = ROOT / "build" / "provider"
PROGRAM = Path(__file__).parent / "programs" / "provider.py"
CLIENT, SECRET = "relay-console", "qH4kVbZr8sX2"


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider that runs."""

    issuer: str


@contextmanager
def running_provider(redirect_uri: str) -> Iterator[Provider]:
    """Yield a provider that has a client of this address."""
    python, port = _python(), free_port()
    process = subprocess.Popen(
        [python, PROGRAM, str(port), CLIENT, SECRET, redirect_uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the provider did not start"
        yield Provider(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _python() -> Path:
    """Return the Python of the provider's environment, which is made when its lock has changed."""
    python, mark = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "lock"
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    with (ENVIRONMENT.parent / "provider.lock").open("w") as one_at_a_time:
        flock(one_at_a_time, LOCK_EX)
        if not mark.exists() or mark.read_bytes() != LOCK.read_bytes():
            venv.create(ENVIRONMENT, clear=True, with_pip=True)
            options = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary=:all:"]
            subprocess.run([python, "-m", "pip", "install", *options, "--requirement", LOCK], check=True)
            mark.write_bytes(LOCK.read_bytes())
    return python
