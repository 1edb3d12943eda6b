"""The version of this release's tables is told without Alembic, and as Alembic tells it."""

import sys
from pathlib import Path
from shutil import make_archive
from subprocess import run

from alembic.script import ScriptDirectory

import relay
from relay.servers.postgres.compatibility import SCRIPTS, head_revision


def test_the_newest_revision_is_alembic_s_head() -> None:
    assert head_revision() == ScriptDirectory(str(SCRIPTS)).get_current_head()


def test_in_a_zip_all_but_the_migrations_can_be_imported(tmp_path: Path) -> None:
    folder = Path(relay.__file__).parent
    archive = make_archive(str(tmp_path / "relay"), "zip", folder.parent, folder.name)
    script = "import sys; sys.path.insert(0, sys.argv[1]); import relay.consume, relay.publisher; print(relay.__file__)"

    imported = run([sys.executable, "-I", "-c", script, archive], capture_output=True, text=True, check=True)

    assert imported.stdout.startswith(archive)
