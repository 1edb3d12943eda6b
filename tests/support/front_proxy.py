"""A private proxy in front of a web server: own folder and port on loopback, ended with us."""

import os
import signal
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from relay.testing.servers.process import Process, ServerError, free_port, is_listening
from relay.testing.servers.server import PrivateServer


class FrontProxy(PrivateServer):
    """A proxy with one site.

    Args:
        site: its text, in which `{port}` is where it listens and `{folder}` its folder.
        files: put into its folder, by their names.
    Attributes:
        text: as it is read at the start.
    """

    IN_ORDER = signal.SIGTERM
    NAME: ClassVar[str]
    CONFIGURATION: ClassVar[str]  # name of the file that it reads

    def __init__(self, site: str, files: dict[str, bytes]) -> None:
        super().__init__(None, durable=False)
        self.port = free_port()
        self.text = site
        self._files = files

    @classmethod
    @abstractmethod
    def is_installed(cls) -> bool:
        """Whether this machine has it."""

    def start(self) -> None:
        self._process = Process(
            self._command(self._folder),
            log=self._folder / "log",
            environment={**os.environ, **self._environment(self._folder)},
            folder=self._folder,
        )
        self._process.wait_until(lambda: is_listening(self.port), 60)

    def _prepare(self, folder: Path) -> None:
        if not self.is_installed():
            raise ServerError(f"{self.NAME} is not installed; `tests/support/packages test` installs it")
        self._folder = folder
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        site = self.text.replace("{port}", str(self.port)).replace("{folder}", str(folder))
        (folder / self.CONFIGURATION).write_text(self._whole(site, folder))

    @abstractmethod
    def _command(self, folder: Path) -> list[str | Path]: ...

    @abstractmethod
    def _whole(self, site: str, folder: Path) -> str:
        """Return the configuration with this site."""

    def _environment(self, folder: Path) -> Mapping[str, str]:  # noqa: ARG002  (for those that need one)
        return {}
