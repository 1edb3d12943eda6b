"""Logins that everybody knows, connections in the clear, secrets in open files."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from relay.config.loading import load
from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.operate.doctor.finding import Finding
from relay.operate.doctor.settings import exposure
from tests.doctor.findings import OK, SKIPPED, WARNING
from tests.support.pipes import piped

DATABASE = DatabaseSettings(url=SecretStr("postgresql://localhost/app"))
BROKER = BrokerSettings(url=SecretStr("amqp://localhost/"))


@pytest.mark.parametrize(
    ("url", "login", "encryption"),
    [
        ("amqp://guest:guest@localhost/", OK, OK),
        ("amqp://guest:guest@127.0.0.1,amqp://guest@[::1]:5672/", OK, OK),
        ("amqp://relay:hunter2@rabbit/", OK, WARNING),
        ("amqps://relay:hunter2@rabbit/", OK, OK),
        ("amqps://guest:guest@rabbit/", WARNING, OK),
        ("amqps://rabbit/", WARNING, OK),  # the client takes guest when no user is named
        ("amqps://relay:hunter2@rabbit/,amqp://10.0.0.7/", WARNING, WARNING),
        ("amqps://rabbit/?certfile=relay.crt&auth=external", OK, OK),  # it names no user
        ("amqps://relay:hunter2@rabbit/?no_verify_ssl=0", OK, OK),
        ("amqps://relay:hunter2@rabbit/?no_verify_ssl=1", OK, WARNING),
        ("amqps://relay:hunter2@[::1]/?no_verify_ssl=1", OK, OK),
    ],
)
def test_how_the_broker_is_entered(url: str, login: str, encryption: str) -> None:
    found = list(exposure(Settings(database=DATABASE, broker=BrokerSettings(url=SecretStr(url))), {}))

    assert [(each.check, each.verdict) for each in found] == [
        ("settings.login", login),
        ("settings.encryption", encryption),
        ("settings.encryption", OK),  # of the database
        ("settings.secret_files", OK),
    ]
    assert not [each for each in found if "hunter2" in each.words]


def test_a_list_that_mixes_both_schemes_says_what_an_attacker_gains() -> None:
    found = of_broker("amqps://relay:hunter2@rabbit/,amqp://relay:hunter2@spare/")

    assert found.words.startswith("broker: messages and password go to spare in the clear; the relay goes there when")


@pytest.mark.parametrize(
    ("url", "verdict", "words"),
    [
        ("postgresql:///app", OK, "loopback or a local socket"),
        ("postgresql://relay@/app?host=/run/postgresql,localhost", OK, "loopback or a local socket"),
        ("postgresql://relay@db/app?hostaddr=127.0.0.1", OK, "loopback or a local socket"),
        (
            "postgresql://relay@localhost/app?hostaddr=10.0.0.7",
            WARNING,
            "sslmode=prefer to 10.0.0.7: a host in between",
        ),
        ("postgresql://relay:hunter2@localhost,db/app", WARNING, "sslmode=prefer to db: a host in between"),
        ("postgresql://relay@db/app?sslmode=allow", WARNING, "sslmode=allow to db: a host in between can refuse TLS"),
        ("postgresql://relay@db/app?sslmode=disable", WARNING, "rows go there in the clear"),
        ("postgresql://relay@db/app?sslmode=require", WARNING, "nothing is verified"),
        ("postgresql://relay@db/app?sslmode=require&sslrootcert=/missing", WARNING, "nothing is verified"),
        ("postgresql://relay@db/app?sslmode=require&sslrootcert={ca}", OK, "sslmode=verify-ca to db"),
        ("postgresql://relay@db/app?sslmode=prefer&sslrootcert={ca}", WARNING, "can refuse TLS"),
        ("postgresql://relay@db/app?sslmode=require&channel_binding=require", OK, "channel_binding"),
        ("postgresql://relay@db/app?sslmode=verify-ca&sslrootcert={ca}", OK, "its name is not"),
        ("postgresql://relay@db/app?sslmode=verify-full&sslrootcert={ca}", OK, "authority and name"),
        ("postgresql://relay@db/app?sslrootcert=system", OK, "authority and name"),
        ("postgresql://relay@db/app?service=billing", SKIPPED, "the service billing decides"),
    ],
)
def test_how_the_database_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, verdict: str, words: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ca.crt").touch()

    found = of_database(url.format(ca=tmp_path / "ca.crt"))

    assert (found.check, found.verdict) == ("settings.encryption", verdict)
    assert words in found.words
    assert "hunter2" not in found.words


def test_what_libpq_finds_in_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert of_database("postgresql://relay@db/app?sslmode=require").verdict == WARNING

    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql" / "root.crt").touch()
    assert of_database("postgresql://relay@db/app?sslmode=require").verdict == OK

    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert "sslmode=verify-full" in of_database("postgresql://relay@db/app").words
    monkeypatch.setenv("PGHOST", "db")
    monkeypatch.setenv("PGSSLMODE", "disable")
    assert of_database("postgresql:///app").verdict == WARNING


def of_database(url: str) -> Finding:
    _, _, found, *_ = exposure(Settings(database=DatabaseSettings(url=SecretStr(url)), broker=BROKER), {})
    return found


def of_broker(url: str) -> Finding:
    _, found, *_ = exposure(Settings(database=DATABASE, broker=BrokerSettings(url=SecretStr(url))), {})
    return found


@pytest.mark.parametrize("variable", ["RELAY_BROKER_URL_FILE", "RELAY_NODE_FILE", "RELAY_RELAY__NODE_FILE"])
@pytest.mark.parametrize(("mode", "verdict"), [(0o600, OK), (0o640, OK), (0o644, WARNING), (0o602, WARNING)])
def test_a_secret_in_a_file(tmp_path: Path, mode: int, verdict: str, variable: str) -> None:
    file = tmp_path / "broker-url"
    file.write_text("amqps://relay:hunter2@rabbit/")
    file.chmod(mode)

    *_, finding = exposure(Settings(database=DATABASE, broker=BROKER), {variable: str(file)})

    assert finding.verdict == verdict
    assert (str(file) in finding.words) is (verdict == WARNING)


@pytest.mark.parametrize(
    ("text", "mode", "verdict"),
    [
        ('[broker]\nurl = "amqps://relay:hunter2@rabbit/"', 0o644, WARNING),
        ('[broker]\nurl = "amqps://relay:hunter2@rabbit/"', 0o600, OK),
        ("[database]\nurl = \"host=db password='hunter2'\"", 0o644, WARNING),
        ('[database]\nurl = "postgresql://relay@db/app"\n[relay]\nnode = "a"', 0o644, OK),
    ],
)
def test_a_password_in_relay_toml(tmp_path: Path, text: str, mode: int, verdict: str) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(text)
    file.chmod(mode)
    loaded = load(config=file, environ={})

    *_, finding = exposure(loaded.settings.model_copy(update={"database": DATABASE, "broker": BROKER}), {}, loaded.file)

    assert finding.verdict == verdict
    assert (str(file) in finding.words) is (verdict == WARNING)


def test_the_key_of_a_certificate_in_an_open_file(tmp_path: Path) -> None:
    key = tmp_path / "tls.key"
    key.touch(0o644)
    url = f"amqps://relay@rabbit/?certfile={tmp_path}/tls.crt&keyfile={key}"

    *_, finding = exposure(Settings(database=DATABASE, broker=BrokerSettings(url=SecretStr(url))), {})

    assert (finding.verdict, finding.remedy) == (WARNING, f"chmod o-rw {key}")


def test_a_file_that_cannot_be_looked_at_is_named() -> None:
    key = "/" + "k" * 300  # refused like a file in a closed folder, and for root too
    url = f"amqps://relay@rabbit/?certfile=/tls.crt&keyfile={key}"

    *_, finding = exposure(Settings(database=DATABASE, broker=BrokerSettings(url=SecretStr(url))), {})

    assert finding.verdict == SKIPPED
    assert finding.words == f"{key}, which holds a secret: File name too long"


def test_a_pipe_is_not_read_again() -> None:
    pipe = piped('[broker]\nurl = "amqps://relay:hunter2@rabbit/"')

    *_, finding = exposure(Settings(database=DATABASE, broker=BROKER), {}, pipe)

    assert finding.verdict == OK
    assert "hunter2" in pipe.read_text()
