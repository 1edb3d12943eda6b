"""The tests of an example, run on a copy of it in which a mistake may be made."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FIRST = "--exitfirst"  # one red test is enough
EXAMPLES = Path(__file__).parents[2] / "examples"


def copy_of(example: str, folder: Path) -> Path:
    """Return a copy of an example, from which `folder` is where its programs run."""
    copy = folder / "examples" / example
    shutil.copytree(EXAMPLES / example, copy, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    return copy


def mistake(file: Path, right: str, wrong: str) -> None:
    """Replace a part of a program, which must be there."""
    code = file.read_text()
    assert right in code
    file.write_text(code.replace(right, wrong))


def run_suite(
    copy: Path, servers: Mapping[str, str], python: str | Path = sys.executable, *options: str
) -> tuple[int, str]:
    """Run the tests in a copy; return pytest's exit code and what it printed.

    Args:
        servers: the variables by which the kit finds its servers.
        python: of the environment that has what the example needs.
        options: for pytest.
    """
    folder = copy.parents[1]
    plain = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-o", "asyncio_default_fixture_loop_scope=function"]
    done = subprocess.run(
        [python, "-m", "pytest", *plain, *options, "--rootdir", folder, copy],
        env={**os.environ, **servers},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout + done.stderr
