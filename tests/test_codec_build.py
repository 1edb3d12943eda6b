"""A build has the compiled codec where there is a compiler, and succeeds without one."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from zipfile import ZipFile

import pytest

from hatch_build import build_codec

ROOT = Path(__file__).parents[1]
BUILD = ("-m", "hatchling", "build", "--target", "wheel", "--directory")


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, *BUILD, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def libraries(folder: Path) -> list[str]:
    (wheel,) = folder.glob("*.whl")
    return [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]


def test_without_a_compiler_the_wheel_is_one_of_python_alone(tmp_path: Path) -> None:
    built = build(tmp_path, CC="false")

    assert built.returncode == 0, built.stderr
    assert "without the compiled codec" in built.stdout + built.stderr
    assert libraries(tmp_path) == []
    assert [wheel.name.endswith("-py3-none-any.whl") for wheel in tmp_path.glob("*.whl")] == [True]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_with_a_compiler_the_wheel_has_it(tmp_path: Path) -> None:
    built = build(tmp_path)

    assert built.returncode == 0, built.stderr
    assert len(libraries(tmp_path)) == 1


def test_a_build_that_must_have_it_fails_without_a_compiler(tmp_path: Path) -> None:
    built = build(tmp_path, CC="false", OUTBOX_RELAY_CODEC="compiled")

    assert built.returncode != 0
    assert not list(tmp_path.glob("*.whl"))


def test_a_build_that_fails_leaves_no_older_library_and_those_of_other_pythons(tmp_path: Path) -> None:
    own, other = (tmp_path / f"compiled_frames{suffix}" for suffix in (EXTENSION_SUFFIXES[0], ".cpython-399-other.so"))
    own.touch()
    other.touch()

    with pytest.raises(ValueError, match="doesn't match any files"):
        build_codec(tmp_path, tmp_path)

    assert (own.exists(), other.exists()) == (False, True)
