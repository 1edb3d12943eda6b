"""The version of this release's tables is told without Alembic, and as Alembic tells it."""

from alembic.script import ScriptDirectory

from relay.servers.postgres.compatibility import SCRIPTS, head_revision


def test_the_newest_revision_is_alembic_s_head() -> None:
    assert head_revision() == ScriptDirectory(str(SCRIPTS)).get_current_head()
