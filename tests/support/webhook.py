"""A private receiver of webhooks, of Debian's package `webhook`: it checks the token, and keeps each body in a file."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

from relay.testing.servers.process import Process, ServerError, free_port, is_listening
from relay.testing.servers.server import PrivateServer

PROGRAM = "webhook"
PAGE = Path(__file__).parents[2] / "docs" / "webhook.md"  # which has the configuration
KEEP = """#!/bin/sh
file=$(mktemp "{folder}/XXXXXX")
printf '%s' "$1" >"$file" && mv "$file" "$file.json"
"""


class Receiver(PrivateServer):
    """Takes what comes with its token, and refuses the rest by 403."""

    IN_ORDER = signal.SIGTERM

    def __init__(self, token: str) -> None:
        super().__init__(None, durable=False)
        self._token = token

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/outbox"

    def start(self) -> None:
        command: list[str | Path] = [
            PROGRAM,
            "-hooks",
            self._folder / "hooks.json",
            "-ip",
            "127.0.0.1",
            "-port",
            str(self.port),
        ]
        command += ["-http-methods", "POST", "-verbose"]
        self._process = Process(command, log=self._folder / "webhook.log", folder=self._folder)
        self._process.wait_until(lambda: is_listening(self.port), 60)

    def received(self) -> list[dict[str, Any]]:
        """Return what came, by its time."""
        found = [json.loads(file.read_bytes()) for file in (self._folder / "received").glob("*.json")]
        return sorted(found, key=lambda each: str(each["time"]))

    def _prepare(self, folder: Path) -> None:
        if not is_installed():
            raise ServerError("webhook is not installed; `tests/support/packages test` installs it")
        self._folder = folder
        self.port = free_port()
        (folder / "received").mkdir()
        program = folder / "keep"
        program.write_text(KEEP.format(folder=folder / "received"))
        program.chmod(0o755)
        (hooks,) = re.findall(r"^    \[\{\n.*?^    \}\]\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        (hook,) = json.loads(hooks.replace("the-token", self._token))
        (folder / "hooks.json").write_text(json.dumps([hook | {"execute-command": str(program)}]))


def is_installed() -> bool:
    """Whether this machine has it."""
    return shutil.which(PROGRAM) is not None
