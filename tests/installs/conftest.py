"""Fresh environments with the wheel of this tree and one part's dependencies, oldest or newest."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.testing.servers.process import run

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"

Install = Callable[..., Path]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution as it is published."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        ["env", "--chdir", ROOT, sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Install:
    """Return a function that installs extras, with the `oldest` or `newest` versions, and returns the Python."""

    def installed(versions: str, *extras: str, beside: tuple[str, ...] = ()) -> Path:
        python = tmp_path / "bin" / "python"
        resolution = {"oldest": "lowest-direct", "newest": "highest"}[versions]
        wanted = [argument for extra in extras for argument in ("--extra", extra)]
        install: list[str | Path] = [UV, "pip", "install", "--quiet", "--native-tls", "--python", python]
        run([UV, "venv", "--quiet", "--python", sys.executable, "--allow-existing", tmp_path])
        run([*install, "--resolution", resolution, "--requirements", ROOT / "pyproject.toml", *wanted, *beside])
        run([*install, "--no-deps", wheel])
        return python

    return installed
