"""A private Caddy: own folder and port on loopback, ended with us."""

import os
import shutil
import signal
from pathlib import Path

from tests.support.process import Process, ServerError, free_port, is_listening
from tests.support.server import Server

PROGRAM = "caddy"

# Caddy would listen on port 80, too, and send browsers from there to https.
MAIN = """
{
    admin off
    auto_https disable_redirects
}
"""


class Caddy(Server):
    """A proxy with one site.

    Args:
        site: its text, in which `{port}` is where it listens and `{folder}` its folder.
        files: put into its folder, by their names.
    Attributes:
        text: as it is read at the start.
    """

    IN_ORDER = signal.SIGTERM

    def __init__(self, site: str, files: dict[str, bytes]) -> None:
        super().__init__(None, durable=False)
        self.port = free_port()
        self.text = site
        self._files = files

    def start(self) -> None:
        kept = {name: str(self._folder) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME")}
        self._process = Process(
            [PROGRAM, "run", "--config", self._folder / "Caddyfile", "--adapter", "caddyfile"],
            log=self._folder / "caddy.log",
            environment={**os.environ, **kept},
            folder=self._folder,
        )
        self._process.wait_until(lambda: is_listening(self.port), 60)

    def _prepare(self, folder: Path) -> None:
        if not is_installed():
            raise ServerError("Caddy is not installed; `tests/support/packages test` installs it")
        self._folder = folder
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        site = self.text.replace("{port}", str(self.port)).replace("{folder}", str(folder))
        (folder / "Caddyfile").write_text(MAIN + site)


def is_installed() -> bool:
    """Whether this machine has Caddy."""
    return shutil.which(PROGRAM) is not None
