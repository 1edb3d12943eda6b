"""Runs the relay's image as strictly as a platform does: with its own user, nothing writable, and no rights."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.testing.servers.process import free_port, wait_for
from tests.cli.command import Result
from tests.container.podman import Podman
from tests.http.site import Site

STRICT = (
    "--network=host",  # where the tests' servers are
    "--read-only",
    "--read-only-tmpfs=false",  # not even /tmp
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--timeout=600",  # one that outlives a killed test run is ended all the same
)


class RelayImage:
    """The relay's image; its containers share these variables."""

    def __init__(self, podman: Podman, image: str, **variables: str) -> None:
        self._podman = podman
        self._options = [*STRICT, *(f"--env={name}={value}" for name, value in variables.items())]
        self._image = image
        self._started: list[str] = []

    def __call__(self, *arguments: str, **variables: str) -> Result:
        """Run a command in a container to its end."""
        return self._podman("run", "--rm", *self._options, *_variables(variables), self._image, *arguments)

    def start(self, *arguments: str, limits: Sequence[str] = (), **variables: str) -> "Container":
        """Start a container, by default with the image's command. `limits`: options of podman."""
        name = f"relay-{secrets.token_hex(4)}"
        self._started.append(name)
        site = Site(f"127.0.0.1:{free_port()}")  # the port that the image has is taken on some machine
        variables = {"RELAY_HTTP_LISTEN": site.address, **variables}
        options = [*self._options, *limits, *_variables(variables), f"--name={name}", f"--hostname={name}"]
        self._podman.do("run", "--detach", *options, self._image, *arguments)
        return Container(self._podman, name, site)

    def remove(self) -> None:
        """End and remove all containers."""
        for name in self._started:
            self._podman.do("rm", "--force", "--time=0", name)


@dataclass(frozen=True, slots=True)
class Container:
    """A container that was started."""

    podman: Podman
    name: str
    site: Site

    def log(self) -> str:
        done = self.podman("logs", self.name)
        return done.out + done.err

    def wait_for_log(self, words: str) -> None:
        """Return once the container's log has these words.

        Raises:
            TimeoutError: the container ended, or was too slow; the message has its log.
        """
        try:
            wait_for(lambda: words in self.log() or not self.is_running(), words, 30)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()}") from None
        if words not in self.log():
            raise TimeoutError(f"{self.name} ended without {words}\n{self.log()}")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines()]

    def is_running(self) -> bool:
        return self._state("Running") == "true"

    def started_at(self) -> datetime:
        return datetime.fromisoformat(self._state('StartedAt.Format "2006-01-02T15:04:05.000000Z07:00"'))

    def wait_for_end(self) -> int:
        """Return the exit code."""
        return int(self.podman.do("wait", self.name, seconds=120))

    def is_healthy(self) -> bool:
        return self.podman("healthcheck", "run", self.name).code == 0

    def healthcheck(self) -> Result:
        """Run the health check as the platform does, and return its output: podman's command returns the code alone."""
        told = self.podman("exec", self.name, "relay", "healthcheck")
        assert self.is_healthy() == (told.code == 0)
        return told

    def stop(self) -> int:
        """Stop the container with SIGTERM, and SIGKILL after 10 s; return the exit code, which is 137 after SIGKILL."""
        self.podman.do("stop", "--time=10", self.name)
        return int(self._state("ExitCode"))

    def _state(self, name: str) -> str:
        return self.podman.do("container", "inspect", "--format", f"{{{{.State.{name}}}}}", self.name)


def _variables(variables: dict[str, str]) -> list[str]:
    return [f"--env={name}={value}" for name, value in variables.items()]
