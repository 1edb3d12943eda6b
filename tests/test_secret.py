"""A secret is read again at each use, and hidden in every text; a URL that can be read in two ways is refused."""

import json
import os
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from structlog.testing import capture_logs

from relay.config.loading import load
from relay.config.secret import SecretFile, SecretSource
from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.config.urls import amqp_urls, libpq_parameters
from relay.runtime.scrub import redacted, remember, remember_url, scrub
from relay.servers.postgres.database import conninfo
from relay.servers.rabbitmq.hosts import broker_urls
from tests.support.pipes import piped

USABLE = "postgresql://u:first@h/d"
RENEWED = "postgresql://u:second@h/d"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "url"
    path.write_text(f"{USABLE}\n")
    return path


def test_a_file_is_read_again_at_each_connection(file: Path) -> None:
    database = DatabaseSettings(url=SecretFile(file))
    assert "password=first" in conninfo(database)

    file.write_text(f"{RENEWED}\n")

    assert "password=second" in conninfo(database)
    assert "password=second" in conninfo(database.model_copy(update={"schema_name": "other"}))


def test_a_link_that_leads_to_another_file_is_followed_again(tmp_path: Path, file: Path) -> None:
    link, renewed = tmp_path / "link", tmp_path / "renewed"
    link.symlink_to(file)
    renewed.write_text(RENEWED)
    database = DatabaseSettings(url=SecretFile(link))

    link.unlink()
    link.symlink_to(renewed)

    assert "password=second" in conninfo(database)


def test_a_pipe_is_read_once_and_its_value_stays() -> None:
    database = DatabaseSettings(url=SecretFile(piped(USABLE)))

    assert "password=first" in conninfo(database)
    assert "password=first" in conninfo(database)


@pytest.mark.parametrize("text", [None, ""], ids=["unwritten", "empty"])
def test_a_pipe_that_gives_nothing_is_refused(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.config.secret.PIPE_TIMEOUT", 0.05)
    path = tmp_path / "pipe" if text is None else piped(text)
    if text is None:
        os.mkfifo(path)

    with pytest.raises(OSError, match="pipe"):
        SecretFile(path)


def test_a_source_is_asked_at_each_connection() -> None:
    passwords = iter(["one", "two", "three", "four", "five"])
    broker = BrokerSettings(url=SecretSource(lambda: f"amqp://u:{next(passwords)}@h/"))

    assert broker_urls(broker)[0].password != broker_urls(broker)[0].password


@pytest.mark.parametrize(
    "text", [None, "", "postgresql://u:half", "postgresql://u:a/b@h/d"], ids=["gone", "empty", "half", "ambiguous"]
)
def test_what_cannot_be_used_does_not_replace_the_last_value(text: str | None, file: Path) -> None:
    database = DatabaseSettings(url=SecretFile(file))
    if text is None:
        file.unlink()
    else:
        file.write_text(text)

    with capture_logs() as logs:
        assert "password=first" in conninfo(database)
        assert "password=first" in conninfo(database)

    assert [(event["event"], event["source"]) for event in logs] == [("secret.not_renewed", f"file {file}")]
    file.write_text(RENEWED)
    assert "password=second" in conninfo(database)


def test_every_file_that_holds_a_url_is_read_again(tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "settings.toml"
    toml.write_text('[broker]\nurl = "amqp://u:first@h/"')
    settings = load(config=toml, environ={"RELAY_DATABASE_URL_FILE": str(file)}).settings

    file.write_text(RENEWED)
    toml.write_text('[relay]\nmax_attempts = 3\n[broker]\nurl = "amqp://u:second@h/"')

    assert "password=second" in conninfo(settings.database)
    assert broker_urls(settings.broker)[0].password == "second"


@pytest.mark.parametrize(
    ("text", "password"),
    [
        ("postgresql://u:a?b#c,d:e@h/d", "a?b#c,d:e"),
        ("postgresql://u:%40%2F%3f@h:1,h2:2/d?application_name=x@y", "@/?"),
        ("postgresql:///d?host=h&password=a%26b", "a&b"),
        (r"host=h password='a\' b'", "a' b"),
        (r"host=h password=a\ b&c", "a b&c"),
    ],
)
def test_a_database_url_is_read_as_libpq_does(text: str, password: str) -> None:
    assert libpq_parameters(text)["password"] == password
    assert password not in redacted(text)


@pytest.mark.parametrize(
    ("text", "passwords"),
    [
        ("amqp://u:a,b@h/", ["a,b"]),
        ("amqp://u:p@q@h/", ["p@q"]),
        ("amqp://u:%3F%2F%23@h/v, amqps://u:x%2Camqp@[::1]:5/", ["?/#", "x,amqp"]),
        ("amqp://h", [None]),
    ],
)
def test_a_broker_url_is_read_as_amqp_clients_do(text: str, passwords: list[str | None]) -> None:
    assert [url.password for url in amqp_urls(text)] == passwords


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:hunter/2@h/d",
        "postgresql://u:12/hunter@h/d",
        "postgresql://u:hunt@er@h/d",
        "postgresql://u:hunter@h/d@e",
        "postgresql://u:hunter",
        "postgresql://u@h:hunter/d",
        "postgresql://u:%hunter@h/d",
        "host=h port=hunter",
    ],
)
def test_a_database_url_that_can_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        DatabaseSettings(url=SecretStr(text))

    assert "hunt" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "amqp://u:hunter/2@h/",
        "amqp://u:hunter?2@h/",
        "amqp://u:12#hunter@h/",
        "amqp://u:[hunter@h/",
        "amqp://u:hunter\\2@h/",
        "amqp://h/,hunter",
        "amqp://a,hunter",
        "amqp://u:hunter",
        "",
    ],
)
def test_a_broker_url_that_can_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        BrokerSettings(url=SecretStr(text))

    assert "hunt" not in str(refused.value)


def test_a_known_password_is_hidden_in_every_form() -> None:
    password = "Vq8'\"\\ü  %/?x"
    remember(password)

    forms = (
        password,
        repr(password),
        json.dumps(password),
        " ".join(password.split()),
        "Vq8%27%22%5C%C3%BC%20%20%25%2F%3Fx",
    )
    for shown in forms:
        assert "Vq8" not in scrub(f"it is {shown}, they say")


@pytest.mark.parametrize(
    ("password", "text", "shown"),
    [
        ("abc", "abc", "abc"),  # too short
        ("Vtes", "Vtes, Vtest and 'Vtes'", "***, Vtest and '***'"),  # a word
        ("Vtestword", "xVtestwordx", "x***x"),
        ("guest", "guest", "guest"),  # the default
    ],
)
def test_a_short_password_is_hidden_where_it_is_not_a_piece_of_a_word(password: str, text: str, shown: str) -> None:
    remember(password)

    assert scrub(text) == shown


def test_a_whole_url_is_shown_without_its_password_however_short() -> None:
    remember_url("postgresql://u:a@h/d")

    assert scrub("no host in postgresql://u:a@h/d") == "no host in postgresql://u:***@h/d"
