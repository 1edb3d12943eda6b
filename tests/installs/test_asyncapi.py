"""AsyncAPI's own parser takes what `relay events export --format asyncapi` prints."""

from pathlib import Path
from shutil import copy, which

import pytest

from relay.testing.servers.process import run

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

PARSER = "@asyncapi/parser@3.6.6"
PROGRAM = Path(__file__).parent / "programs" / "asyncapi.mjs"
EXPORT = Path(__file__).parents[1] / "operate" / "events" / "shop.asyncapi.json"


@pytest.mark.skipif(which("npm") is None, reason="npm is not installed")
def test_the_official_parser_takes_an_export(tmp_path: Path) -> None:
    copy(PROGRAM, tmp_path)
    run(["npm", "install", "--silent", "--prefix", tmp_path, PARSER])

    told = run(["node", tmp_path / PROGRAM.name, EXPORT])

    assert told.split() == ["3", "5"]
