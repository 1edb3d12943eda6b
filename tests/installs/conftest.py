"""Fresh environments with the wheel of this tree and one part's dependencies, oldest or newest."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import run
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import channel, outbox, run_node
from tests.testing.conftest import managed

__all__ = ["channel", "managed", "outbox", "run_node"]

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


@pytest.fixture(scope="session")
def install_into(wheel: Path) -> Install:
    """Return a function that makes an environment in a folder.

    It installs extras there, with the `oldest` or `newest` versions, and returns the Python.
    """

    def installed(folder: Path, versions: str, *extras: str, beside: tuple[str, ...] = ()) -> Path:
        python = folder / "bin" / "python"
        resolution = {"oldest": "lowest-direct", "newest": "highest"}[versions]
        wanted = [argument for extra in extras for argument in ("--extra", extra)]
        install: list[str | Path] = [UV, "pip", "install", "--quiet", "--native-tls", "--python", python]
        run([UV, "venv", "--quiet", "--python", sys.executable, "--allow-existing", folder])
        run([*install, "--resolution", resolution, "--requirements", ROOT / "pyproject.toml", *wanted, *beside])
        run([*install, "--no-deps", wheel])
        return python

    return installed


@pytest.fixture
def install(install_into: Install, tmp_path: Path) -> Install:
    """Return a function as `install_into`, whose folder is that of the test."""
    return partial(install_into, tmp_path)


@pytest.fixture
def servers(postgres: PostgresServer, managed: tuple[RabbitServer, str]) -> dict[str, str]:
    """The variables by which the kit finds its servers."""
    rabbitmq, management_url = managed
    return {
        "OUTBOX_TEST_SERVER_URL": postgres.admin_url,
        "OUTBOX_TEST_BROKER_URL": rabbitmq.url(),
        "OUTBOX_TEST_MANAGEMENT_URL": management_url,
    }
