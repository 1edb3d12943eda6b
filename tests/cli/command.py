"""Run the `relay` command, as a user does."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from relay.cli.command import run_command
from tests.support.log import log_as_before

RELAY = Path(sys.executable).with_name("relay")
PASSWORD = "hunter2"  # in every URL of these tests; no output may repeat it


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


class Command:
    """`relay` with the environment of a test."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = variables

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        usual = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
        return {**usual, **self.variables, **more}

    def __call__(self, *arguments: str, **variables: str) -> Result:
        """Run a command in this process, ten times as fast as in a new one."""
        out, err = io.StringIO(), io.StringIO()
        with (
            patch.dict(os.environ, self.environment(variables), clear=True),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            log_as_before(),
        ):
            code = run_command(arguments)
        return _without_leaks(Result(code, out.getvalue(), err.getvalue()))

    def process(self, *arguments: str, **variables: str) -> Result:
        """Run the installed command to its end."""
        done = subprocess.run(
            [RELAY, *arguments],
            cwd=self.folder,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return _without_leaks(Result(done.returncode, done.stdout, done.stderr))

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the installed command until the end of the block at the latest."""
        with subprocess.Popen(
            [RELAY, *arguments],
            cwd=self.folder,
            env=self.environment({}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def _without_leaks(result: Result) -> Result:
    assert "Traceback" not in result.err, result.err
    assert PASSWORD not in result.out + result.err
    return result
