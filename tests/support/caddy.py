"""A private Caddy."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.support.front_proxy import FrontProxy

PROGRAM = "caddy"

# Caddy would listen on port 80, too, and send browsers from there to https.
MAIN = """
{
    admin off
    auto_https disable_redirects
}
"""


class Caddy(FrontProxy):
    NAME, CONFIGURATION = "Caddy", "Caddyfile"

    @classmethod
    def is_installed(cls) -> bool:
        return shutil.which(PROGRAM) is not None

    def _command(self, folder: Path) -> list[str | Path]:
        return [PROGRAM, "run", "--config", folder / self.CONFIGURATION, "--adapter", "caddyfile"]

    def _whole(self, site: str, folder: Path) -> str:  # noqa: ARG002  (as of every proxy)
        return MAIN + site

    def _environment(self, folder: Path) -> Mapping[str, str]:
        return dict.fromkeys(("XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(folder))
