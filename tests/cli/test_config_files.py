"""`relay config roles|alerts|example|...`: files of this release, from a checkout and from an installed wheel."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relay.operate.packaged import DASHBOARDS, EXAMPLES, JOBS, PLACEHOLDER, RUNBOOKS
from tests.cli.command import Command
from tests.support.roles import SCRIPT

ROOT = Path(__file__).parents[2]
KINDS = {".md", ".py", ".sql", ".toml"}
BUILD = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
PRINTED = [["roles"], ["alerts"], ["examples"], ["example"], *(["example", name] for name in EXAMPLES)]
RUN = """
import contextlib, io, json, sys
from relay.cli.command import run_command

def printed(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run_command(["config", *arguments]) == 0
    return out.getvalue()

json.dump([printed(each) for each in json.load(sys.stdin)], sys.stdout)
"""


def test_roles_are_the_script_of_this_release(tmp_path: Path) -> None:
    result = Command(tmp_path)("config", "roles")

    assert (result.code, result.err) == (0, "")
    assert result.out == SCRIPT


def test_roles_are_for_the_schema_that_is_configured_or_named(tmp_path: Path) -> None:
    relay = Command(tmp_path, RELAY_DATABASE_SCHEMA="events")

    assert "\n) ON events.message TO events_writer;" in relay("config", "roles").out
    assert "\n) ON billing.message TO billing_writer;" in relay("config", "roles", "--schema", "billing").out


@pytest.mark.parametrize("schema", ["a; DROP SCHEMA outbox", 'a"', "Outbox", ""])
def test_what_is_no_schema_is_refused(tmp_path: Path, schema: str) -> None:
    result = Command(tmp_path)("config", "roles", "--schema", schema)

    assert (result.code, result.out) == (2, "")
    assert "database.schema" in result.err


def test_alerts_lead_to_the_runbooks_of_the_console_that_is_named(tmp_path: Path) -> None:
    told = Command(tmp_path)("config", "alerts", "--console", "https://console.example.net/").out

    assert "runbook_url: https://console.example.net/runbooks/OutboxStalled\n" in told
    assert PLACEHOLDER not in told


def test_alerts_are_the_rules_of_this_release(tmp_path: Path) -> None:
    assert Command(tmp_path)("config", "alerts").out == (ROOT / "config" / "prometheus" / "alerts.yml").read_text()


def test_every_example_is_listed_and_printed(tmp_path: Path) -> None:
    relay = Command(tmp_path)
    files = files_below(ROOT / "examples")

    listed = [line.split("\t")[0] for line in relay("config", "examples").out.splitlines()[1:]]

    assert set(listed) >= {*files, "relay.toml", "compose.yaml"}
    for name, text in files.items():
        assert relay("config", "example", name).out == text


def test_an_unknown_example_is_refused(tmp_path: Path) -> None:
    refused = Command(tmp_path)("config", "example", "compose.yml")

    assert refused.code == 2
    assert "there is no example compose.yml: `relay config examples` lists them" in refused.err


def test_an_installed_wheel_prints_what_the_checkout_does(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    relay = Command(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env=relay.environment({"PYTHONPATH": str(installed)}),
        input=json.dumps([*PRINTED, ["examples", "--folder"], ["jobs"], ["dashboards"]]),
        capture_output=True,
        text=True,
        check=True,
    )
    *printed, folder, jobs, dashboards = json.loads(done.stdout)

    assert printed == [relay("config", *each).out for each in PRINTED]
    assert Path(jobs.strip()).is_relative_to(installed)
    assert {file.name for file in Path(jobs.strip()).iterdir()} == {file.name for file in JOBS.glob("*.*")}
    assert (Path(folder.strip()) / "pipeline" / "daily.py").is_relative_to(installed)
    assert files_below(Path(folder.strip())) == files_below(ROOT / "examples")
    assert files_below(installed / "relay" / "docs" / "runbooks") == files_below(RUNBOOKS)
    assert Path(dashboards.strip()).is_relative_to(installed)
    assert {file.name for file in Path(dashboards.strip()).iterdir()} == {
        file.name for file in DASHBOARDS.glob("*.json")
    }


def files_below(folder: Path) -> dict[str, str]:
    """Return the text of each example, by its place."""
    found = [file for file in folder.rglob("*") if file.suffix in KINDS]
    return {str(file.relative_to(folder)): file.read_text() for file in found}
