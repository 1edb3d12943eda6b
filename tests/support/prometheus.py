"""A private Prometheus: own folder and port on loopback, ended with us."""

import json
import shutil
import signal
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from relay.testing.servers.process import Process, ServerError, free_port
from relay.testing.servers.server import PrivateServer

PROGRAM = "prometheus"
INTERVAL = "500ms"  # between two scrapes, and between two evaluations of the rules


class Prometheus(PrivateServer):
    """A server that scrapes and evaluates rules from its start on.

    `targets`: the address of each job. `rules`: the text of a file of rules.
    """

    IN_ORDER = signal.SIGTERM

    def __init__(self, targets: Mapping[str, str], rules: str) -> None:
        super().__init__(None, durable=False)
        self._targets = targets
        self._rules = rules

    def start(self) -> None:
        self._process = Process(
            [
                PROGRAM,
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            log=self._folder / "prometheus.log",
            folder=self._folder,
        )
        self._process.wait_until(self._is_ready, 60)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now, each with `metric` and `value`."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {each["labels"]["alertname"] for each in self._get("alerts")["alerts"] if each["state"] == "firing"}

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _prepare(self, folder: Path) -> None:
        if not is_installed():
            raise ServerError("Prometheus is not installed; `tests/support/packages test` installs it")
        self._folder = folder
        self.port = free_port()
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in self._targets.items()
        ]
        configuration = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        (folder / "rules.yml").write_text(self._rules)


def is_installed() -> bool:
    """Whether this machine has Prometheus."""
    return shutil.which(PROGRAM) is not None
