"""The example of docs/testing.md passes, and fails as the page says."""

from pathlib import Path

import pytest

from relay.testing.servers.rabbitmq import RabbitServer
from tests.testing.suite import NOT_ON_LINUX, run_suite

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLE, HANDLERS, SCENARIO, _ = (block.removeprefix("python\n") for block in PAGE.split("```")[1::2])


def test_the_example_passes(server_url: str, tmp_path: Path) -> None:
    done = run_suite(EXAMPLE, tmp_path, server_url)

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_handlers_passes(server_url: str, tmp_path: Path) -> None:
    done = run_suite(HANDLERS, tmp_path, server_url, "-o", "asyncio_mode=auto")

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_real_servers_passes(
    server_url: str, managed: tuple[RabbitServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, management = managed
    monkeypatch.setenv("OUTBOX_TEST_BROKER_URL", server.url())
    monkeypatch.setenv("OUTBOX_TEST_MANAGEMENT_URL", management)

    done = run_suite(SCENARIO, tmp_path, server_url, "-o", "asyncio_mode=auto")

    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "outbox_test" not in server.ctl("list_vhosts")


def test_the_example_of_real_servers_passes_on_a_private_broker(server_url: str, tmp_path: Path) -> None:
    done = run_suite(SCENARIO, tmp_path, server_url, "-o", "asyncio_mode=auto")

    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_where_no_broker_can_be_had_the_fixture_says_what_it_needs(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(NOT_ON_LINUX)

    done = run_suite(SCENARIO, tmp_path, server_url, "-o", "asyncio_mode=auto")

    assert "relay_rabbitmq needs a server: install RabbitMQ on Linux; or set OUTBOX_TEST_BROKER_URL, or" in done.stdout


def test_the_example_fails_as_the_page_says(server_url: str, tmp_path: Path) -> None:
    done = run_suite(EXAMPLE.replace('payload={"amount": 12.5}', 'payload={"amount": 13}'), tmp_path, server_url)

    printed = [line.removeprefix("E").strip() for line in done.stdout.splitlines()]
    for line in PAGE.partition("prints the nearest rows:\n\n")[2].partition("\n\n")[0].splitlines():
        assert any(each.endswith(line.strip()) for each in printed), done.stdout
