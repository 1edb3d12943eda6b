"""The console does not start where a user could use it without authentication."""

from pathlib import Path
from typing import Any

import pytest

from relay.config.settings import ConsoleSettings
from relay.console.access.requirements import check_access
from relay.errors import ConfigurationError
from tests.cli.command import Command

ORIGIN = "https://relay.test"


@pytest.mark.parametrize("address", ["0.0.0.0:8420", "[::]:8420", "192.0.2.1:8420", "relay.test:8420"])
def test_beyond_loopback_it_needs_authentication(tmp_path: Path, address: str) -> None:
    result = Command(tmp_path)("console", RELAY_CONSOLE_LISTEN=address, RELAY_CONSOLE_ORIGIN=ORIGIN)

    assert result.code == 2
    assert "beyond loopback the console needs authentication" in result.err
    assert "console.authentication" in result.err


@pytest.mark.parametrize("address", ["127.0.0.1:8420", "127.8.8.8:8420", "[::1]:8420", "localhost:8420"])
def test_on_loopback_the_token_of_its_start_is_enough(address: str) -> None:
    check_access(ConsoleSettings(listen=address))


@pytest.mark.parametrize(
    ("console", "words"),
    [
        ({"authentication": "password"}, "console.users"),
        ({"authentication": "password", "users": "/nowhere/users"}, "No such file"),
        ({"authentication": "proxy", "owner_groups": "sre"}, "console.trusted_proxies"),
        ({"authentication": "proxy", "trusted_proxies": "10.0.0.1"}, "nobody has a role"),
        ({"authentication": "oidc", "owner_groups": "sre", "oidc_client_id": "x"}, "console.oidc_issuer"),
        ({"listen": "0.0.0.0:1", "authentication": "proxy"}, "set console.origin"),
        ({"origin": "http://relay.test"}, "by https alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_named(console: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_access(ConsoleSettings.model_validate(console))


def test_an_empty_password_file_lets_nobody_in_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("")

    with pytest.raises(ConfigurationError, match="has no users"):
        check_access(
            ConsoleSettings.model_validate(
                {"authentication": "password", "users": str(tmp_path / "users"), "origin": ORIGIN}
            )
        )
