"""Where folders are made, and how several test runs on one machine remove those of dead owners at the same time."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relay.testing.servers import folders
from relay.testing.servers.folders import temporary_folder

MAKE_MANY = """
from relay.testing.servers.folders import temporary_folder
for _ in range(200):
    with temporary_folder() as folder:
        (folder / "file").write_text("mine")
        assert (folder / "file").read_text() == "mine"
"""


def test_runs_beside_each_other_leave_each_other_s_folders_alone() -> None:
    runs = [subprocess.Popen([sys.executable, "-c", MAKE_MANY], stderr=subprocess.PIPE, text=True) for _ in range(4)]

    said = [run.communicate()[1] for run in runs]

    assert said == [""] * 4


@pytest.mark.parametrize(
    ("enough", "in_memory", "place"), [(1, True, "memory"), (1, False, "disk"), (1 << 60, True, "disk")]
)
def test_a_folder_is_in_memory_if_asked_for_and_if_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int, in_memory: bool, place: str
) -> None:
    places = {name: tmp_path / name for name in ("memory", "disk")}
    for each in places.values():
        each.mkdir()
    monkeypatch.setattr(folders, "MEMORY", places["memory"])
    monkeypatch.setattr(folders, "ENOUGH", enough)
    monkeypatch.setattr(tempfile, "tempdir", str(places["disk"]))

    with temporary_folder(in_memory=in_memory) as folder:
        assert folder.parent == places[place]


def test_a_machine_without_a_file_system_in_memory_uses_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MEMORY", tmp_path / "none")

    with temporary_folder(in_memory=True) as folder:
        assert folder.parent == Path(tempfile.gettempdir())


def test_what_is_no_folder_of_ours_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{folders.PREFIX}main.zip").touch()
    (tmp_path / f"{folders.PREFIX}loop").symlink_to(f"{folders.PREFIX}loop")
    (tmp_path / f"{folders.PREFIX}elsewhere").symlink_to(tmp_path)
    before = {each.name for each in tmp_path.iterdir()}

    with temporary_folder():
        pass

    assert {each.name for each in tmp_path.iterdir()} == before
