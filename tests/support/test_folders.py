"""Several test runs on one machine make folders and remove those of dead owners at the same time."""

import subprocess
import sys

MAKE_MANY = """
from tests.support.folders import temporary_folder
for _ in range(200):
    with temporary_folder() as folder:
        (folder / "file").write_text("mine")
        assert (folder / "file").read_text() == "mine"
"""


def test_runs_beside_each_other_leave_each_other_s_folders_alone() -> None:
    runs = [subprocess.Popen([sys.executable, "-c", MAKE_MANY], stderr=subprocess.PIPE, text=True) for _ in range(4)]

    said = [run.communicate()[1] for run in runs]

    assert said == [""] * 4
