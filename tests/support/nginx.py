"""A private nginx: own folder and port on loopback, ended with us."""

import signal
from pathlib import Path

from tests.support.process import Process, ServerError, free_port, is_listening
from tests.support.server import Server

PROGRAM = Path("/usr/sbin/nginx")  # no user but root has its folder in PATH

MAIN = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


class Nginx(Server):
    """A proxy with one block `server`.

    Args:
        server: its text, in which `{port}` is where it listens and `{folder}` its folder.
        files: put into its folder, by their names.
    Attributes:
        text: as it is read at the start.
    """

    IN_ORDER = signal.SIGTERM

    def __init__(self, server: str, files: dict[str, bytes]) -> None:
        super().__init__(None, durable=False)
        self.port = free_port()
        self.text = server
        self._files = files

    def start(self) -> None:
        self._process = Process(
            [PROGRAM, "-p", self._folder, "-c", self._folder / "nginx.conf"],
            log=self._folder / "nginx.log",
            folder=self._folder,
        )
        self._process.wait_until(lambda: is_listening(self.port), 60)

    def _prepare(self, folder: Path) -> None:
        if not is_installed():
            raise ServerError("nginx is not installed; `tests/support/packages test` installs it")
        self._folder = folder
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        server = self.text.replace("{port}", str(self.port)).replace("{folder}", str(folder))
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder, server=server))


def is_installed() -> bool:
    """Whether this machine has nginx."""
    return PROGRAM.exists()
