"""`relay config roles`: the script for psql, from a checkout and from an installed wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.command import Command

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "config" / "roles.sql"
BUILD = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
RUN = "import sys; from relay.cli import main; import relay; print(relay.__file__, file=sys.stderr); main(sys.argv[1:])"


def test_it_is_the_script_of_this_release(tmp_path: Path) -> None:
    result = Command(tmp_path)("config", "roles")

    assert (result.code, result.err) == (0, "")
    assert result.out == SCRIPT.read_text()


def test_it_is_for_the_schema_that_is_configured_or_named(tmp_path: Path) -> None:
    relay = Command(tmp_path, RELAY_DATABASE__SCHEMA="events")

    assert "\n) ON events.message TO events_writer;" in relay("config", "roles").out
    assert "\n) ON billing.message TO billing_writer;" in relay("config", "roles", "--schema", "billing").out


@pytest.mark.parametrize("schema", ["a; DROP SCHEMA outbox", 'a"', "Outbox", ""])
def test_what_is_no_schema_is_refused(tmp_path: Path, schema: str) -> None:
    result = Command(tmp_path)("config", "roles", "--schema", schema)

    assert (result.code, result.out) == (2, "")
    assert "database.schema" in result.err


def test_an_installed_wheel_has_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    done = subprocess.run(
        [sys.executable, "-c", RUN, "config", "roles"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stderr.startswith(str(installed))
    assert done.stdout == SCRIPT.read_text()
