"""Logins that everybody knows, connections in the clear, secrets in open files."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from relay.doctor.exposure import exposure
from relay.settings import BrokerSettings, Settings
from tests.doctor.findings import OK, WARNING


@pytest.mark.parametrize(
    ("url", "login", "encryption"),
    [
        ("amqp://guest:guest@localhost/", OK, OK),
        ("amqp://guest:guest@127.0.0.1,amqp://guest@[::1]:5672/", OK, OK),
        ("amqp://relay:hunter2@rabbit/", OK, WARNING),
        ("amqps://relay:hunter2@rabbit/", OK, OK),
        ("amqps://guest:guest@rabbit/", WARNING, OK),
        ("amqps://rabbit/", WARNING, OK),  # the client takes guest when none is named
        ("amqps://relay:hunter2@rabbit/,amqp://10.0.0.7/", WARNING, WARNING),
    ],
)
def test_how_the_broker_is_entered(url: str, login: str, encryption: str) -> None:
    found = list(exposure(Settings(broker=BrokerSettings(url=SecretStr(url))), {}))

    assert {each.check: each.verdict for each in found} == {
        "settings.login": login,
        "settings.encryption": encryption,
        "settings.secret_files": OK,
    }
    assert not [each for each in found if "hunter2" in each.words]


@pytest.mark.parametrize(("mode", "verdict"), [(0o600, OK), (0o640, OK), (0o644, WARNING)])
def test_a_secret_in_a_file(tmp_path: Path, mode: int, verdict: str) -> None:
    file = tmp_path / "broker-url"
    file.write_text("amqps://relay:hunter2@rabbit/")
    file.chmod(mode)

    *_, finding = exposure(Settings(), {"RELAY_BROKER_URL_FILE": str(file)})

    assert finding.verdict == verdict
    assert (str(file) in finding.words) is (verdict == WARNING)
