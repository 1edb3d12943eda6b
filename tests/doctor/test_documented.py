"""docs/doctor.md lists the checks of settings, database and broker, and no others."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = r"(?:settings|database|broker)\.[a-z_]+"


def test_the_documented_checks_are_those_of_the_doctor() -> None:
    code = "".join(file.read_text() for file in (ROOT / "relay" / "operate" / "doctor").glob("*.py"))
    listed = re.findall(rf"^- `({CHECK})`: ", (ROOT / "docs" / "doctor.md").read_text(), re.MULTILINE)

    assert sorted(listed) == sorted(set(re.findall(rf'"({CHECK})"', code)))
