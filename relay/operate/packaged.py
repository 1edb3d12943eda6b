"""Files for other programs that come with this release: in the wheel, and in `config/` of a checkout."""

import re
from importlib.resources import files
from pathlib import Path

_INSTALLED = files("relay") / "config"
FILES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "config"


def roles(schema: str) -> str:
    """Return config/roles.sql for the tables in `schema`, whose roles are then `<schema>_writer` and so on."""
    script = (FILES / "roles.sql").read_text(encoding="utf-8")
    return re.sub(r"\boutbox", schema, script)
