"""The version that this release's tables have.

Without Alembic: with SQLAlchemy it takes 0.4 s to import, and `relay healthcheck` runs every few seconds.
"""

from pathlib import Path

import relay

_PACKAGE = Path(relay.__file__).parent

# Inside the installed package, or next to it in a checkout.
SCRIPTS = next(folder for folder in (_PACKAGE / "migrations", _PACKAGE.parent / "migrations") if folder.is_dir())


def head_revision() -> str:
    """Return the newest revision: the number that its file's name begins with.

    tests/migrations/test_migrate.py compares with Alembic, which reads the files.
    """
    return max(file.name.partition("_")[0] for file in (SCRIPTS / "versions").glob("[0-9]*_*.py"))
