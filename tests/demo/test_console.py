"""`make console` as a newcomer runs it: a shop with something in it, on real servers, and nothing is left of it."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.process import free_port, wait_for
from tests.demo.processes import processes_of, started

SOON = 60  # seconds, on a busy machine


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in place of .demo/."""
    with temporary_folder() as folder:
        yield folder


def printed_address(demo: subprocess.Popen[str]) -> tuple[str, str]:
    """Return address and token, as they are printed once the console listens."""
    said = []
    assert demo.stdout is not None
    for line in demo.stdout:
        said.append(line)
        if line.startswith("open http://"):
            address, _, token = line.removeprefix("open ").strip().partition("/?token=")
            return address, token
    raise AssertionError("".join(said))


class Api:
    """The console's API and pages."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str) -> Any:
        return self._client.get(f"/api/v1{path}").raise_for_status().json()

    def wait_for(self, path: str, *words: str) -> None:
        """Return once a page shows all these words; its looks at the broker take a moment."""

        def shows() -> bool:
            page = self._client.get(path).raise_for_status().text
            return all(each in page for each in words)

        wait_for(shows, f"{path} shows {words}", SOON)


@contextmanager
def asking(address: str, token: str) -> Iterator[Api]:
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        client.get("/", params={"token": token})  # gives the cookie for the pages
        yield Api(client)


@pytest.mark.timeout(400)
def test_the_console_has_a_shop_with_something_in_it_twice_and_stops_clean(place: Path) -> None:
    for turn in ("the first run", "a second run"):
        variables = {"DEMO_FOLDER": str(place), "RELAY_CONSOLE_LISTEN": f"127.0.0.1:{free_port()}"}
        with started("demo.console", **variables) as demo, asking(*printed_address(demo)) as api:
            groups = {each["source"]: each["count"] for each in api.get("/failures")["groups"]}

            assert [each["name"] for each in api.get("/status")["nodes"] if each["alive"]] == ["demo"], turn
            assert "shop.orders" in str(api.get("/topology")), turn
            assert groups == {"parked": 12, "quarantine": 3}, turn
            assert [each["state"] for each in api.get("/jobs")["rows"]] == ["paused"], turn
            api.wait_for("/consumers", "shop.orders", 'Last applied"><time ')
            api.wait_for("/failures", "the tax office does not answer", "shop.orders.dead")
            api.wait_for("/", "3 dead letters in shop.orders.dead", "consumer shop holds 3 messages", "does not work")

            demo.send_signal(signal.SIGINT)
            said = demo.communicate()[0]

        assert demo.returncode == 0, said
        assert "nothing is left running" in said
        wait_for(lambda: processes_of(place) == [], "every process is gone", 10)
