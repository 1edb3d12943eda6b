"""No command shows a password, whole or in part, whatever characters it has and whatever the servers do."""

import json
import socket
import subprocess
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from select import select
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from cyclopts import App
from psycopg.conninfo import make_conninfo

from relay.cli.command import app
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import Command, Result

BEFORE, BEHIND = "Kx7qW", "Zp4w9"  # neither is in any message
SPECIAL = "?/@:#%[],'\" \\&=+"
PRINTABLE = "".join(map(chr, range(32, 127)))
PASSWORDS = [
    PRINTABLE,
    *(f"{char}{BEFORE}{char}{BEHIND}" for char in SPECIAL),
    f"{BEFORE}%41{BEHIND}",
    f"1234/{BEHIND}",
]
# One for each place where a secret may stand: URLs, their parameters, and tokens.
SECRETS = [f"{letter}Kx7qWZp4w9" for letter in "abcdef"]
every_password = pytest.mark.parametrize("password", PASSWORDS, ids=range(len(PASSWORDS)))
every_printable = pytest.mark.parametrize("password", [PRINTABLE], ids=["printable"])

# Each with what it needs to come as far as the servers.
COMMANDS = [
    ["status"],
    ["status", "--output", "json"],
    ["doctor"],
    ["doctor", "--output", "json"],
    ["migrate"],
    ["migrate", "--check"],
    ["parked", "list"],
    ["parked", "show", "1"],
    ["parked", "retry", "--all"],
    ["parked", "discard", "--all", "--why", "test", "--yes"],
    ["parked", "edit", "1", "--payload", "/dev/null", "--why", "test", "--yes"],
    ["quarantine", "list"],
    ["quarantine", "released"],
    ["failures", "list"],
    ["failures", "show", "1"],
    ["parked", "archive", "--all", "--why", "test"],
    ["parked", "restore", "--all", "--why", "test"],
    ["quarantine", "show", "1"],
    ["quarantine", "reroute", "1", "--routing-key", "new", "--why", "test"],
    ["quarantine", "discard", "1", "--why", "test", "--yes"],
    ["quarantine", "probe", "1"],
    ["quarantine", "pause", "", "later", "--why", "test"],
    ["quarantine", "resume", "1"],
    ["held", "list"],
    ["held", "retry", "--all", "--why", "test"],
    ["batches", "list"],
    ["batches", "show", "nightly", "7"],
    ["batches", "give-up", "nightly", "7", "--yes", "--why", "test"],
    ["lanes", "list"],
    ["lanes", "pause", "7", "--why", "test"],
    ["lanes", "resume", "7"],
    ["dead-letters", "list", "billing.dead"],
    ["dead-letters", "show", "billing.dead", "1"],
    ["dead-letters", "retry", "billing.dead", "--all", "--why", "test"],
    ["dead-letters", "discard", "billing.dead", "--all", "--why", "test", "--yes"],
    ["dead-letters", "export", "billing.dead", "letters.jsonl"],
    ["config", "roles"],
    ["pool", "run"],
    ["pool", "status"],
    ["replay", "--all"],
    ["audit", "list"],
    ["jobs", "list"],
    ["jobs", "show", "1"],
    ["jobs", "resume", "1"],
    ["jobs", "pause", "1"],
    ["jobs", "cancel", "1", "--why", "test", "--yes"],
    ["reconcile", "--since", "1h"],
    ["topology", "apply"],
    ["topology", "show"],
    ["events", "list", "tests.operate.events.shop"],
    ["events", "export", "tests.operate.events.shop"],
    ["events", "check", "tests.operate.events.shop", "--against", "main.json"],
    ["retention", "--dry-run"],
    ["config", "show"],
    ["config", "show", "--output", "json"],
    ["config", "example"],
    ["config", "examples"],
    ["config", "alerts"],
    ["config", "dashboards"],
    ["config", "jobs"],
    ["console", "user", "list", "--file", "users"],
    ["console", "user", "remove", "ann", "--file", "users"],
    ["console", "token", "list", "--file", "tokens"],
    ["console", "token", "remove", "billing", "--file", "tokens"],
    ["completion", "bash"],
    ["healthcheck"],
]
every_command = pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)


def raw(password: str, database: str, broker: str) -> tuple[str, str]:
    return f"postgresql://app:{password}@{database}/d", f"amqp://app:{password}@{broker}/"


def encoded(password: str, database: str, broker: str) -> tuple[str, str]:
    return raw(quote(password, safe=""), database, broker)


def as_parameter(password: str, database: str, broker: str) -> tuple[str, str]:
    database_url = f"postgresql://app@{database}/d?password={quote(password, safe='')}"
    return database_url, encoded(password, database, broker)[1]


def as_words(password: str, database: str, broker: str) -> tuple[str, str]:
    host, port = database.split(":")
    url = make_conninfo(host=host, port=port, user="app", dbname="d", password=password)
    return url, encoded(password, database, broker)[1]


def of_several_hosts(password: str, database: str, broker: str) -> tuple[str, str]:
    code = quote(password, safe="").lower()
    url = f"postgresql://app:{code}@{database},{database}/d"
    return url, f"amqp://app:{code}@{broker}/,amqp://other:{code}@{broker}/"


every_way = pytest.mark.parametrize("way", [raw, encoded, as_parameter, as_words, of_several_hosts])


def assert_no_leak(result: Result, password: str) -> None:
    shown = result.out + result.err
    assert "Traceback" not in shown, shown
    if password == PRINTABLE:  # of which no piece may be shown either
        pieces = {PRINTABLE[at : at + 6] for at in range(len(PRINTABLE) - 5)}
    else:
        pieces = {BEFORE, BEHIND, BEFORE.lower(), BEHIND.lower()}
    pieces |= {quote(piece, safe="") for piece in pieces}
    pieces |= {json.dumps(piece)[1:-1] for piece in pieces} | {repr(piece)[1:-1] for piece in pieces}
    assert [piece for piece in pieces if piece in shown] == []


@pytest.fixture
def silent() -> Iterator[str]:
    """A place that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_commands_here_are_all_that_there_are() -> None:
    def leaves(app: App, *path: str) -> Iterator[tuple[str, ...]]:
        below = [name for name in app if not name.startswith("-")]
        if not below or app.default_command is not None:
            yield path
        for name in below:
            yield from leaves(app[name], *path, name)

    tried = {tuple(arguments[:words]) for arguments in COMMANDS for words in (1, 2, 3)}
    # These end with their server, ask for a password, or print a token.
    assert set(leaves(app())) - tried == {("run",), ("console", "user", "add"), ("console", "token", "add")}


@every_printable
@every_command
def test_no_command_shows_it_when_the_servers_refuse(
    arguments: list[str], password: str, tmp_path: Path, postgres: PostgresServer, rabbitmq: RabbitServer
) -> None:
    database, broker = encoded(password, f"127.0.0.1:{postgres.port}", f"127.0.0.1:{rabbitmq.port}")

    assert_no_leak(run(tmp_path, arguments, database, broker), password)


@every_printable
@every_command
def test_no_command_shows_it_when_the_servers_are_away(arguments: list[str], password: str, tmp_path: Path) -> None:
    database, broker = encoded(password, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")

    assert_no_leak(run(tmp_path, arguments, database, broker), password)


@every_printable
@pytest.mark.parametrize("arguments", [["status"], ["topology", "apply"]], ids=" ".join)
def test_no_command_shows_it_when_the_servers_do_not_answer(
    arguments: list[str], password: str, tmp_path: Path, silent: str
) -> None:
    assert_no_leak(run(tmp_path, arguments, *encoded(password, silent, silent)), password)


@every_password
@every_way
@pytest.mark.parametrize("arguments", [["config", "show"], ["status"]], ids=" ".join)
def test_no_character_brings_it_to_light(arguments: list[str], way: Any, password: str, tmp_path: Path) -> None:
    database, broker = way(password, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")

    assert_no_leak(run(tmp_path, arguments, database, broker), password)


@every_password
@pytest.mark.parametrize("way", [raw, as_words])
def test_an_argument_in_the_wrong_place_is_not_repeated(way: Any, password: str, tmp_path: Path) -> None:
    relay = Command(tmp_path)
    for url in way(password, "h:1", "h:1"):
        for arguments in (["status", url], ["status", f"--databse-url={url}"], [url], ["parked", "show", url]):
            result = relay(*arguments, RELAY_DATABASE_URL="")
            assert result.code == 2
            assert_no_leak(result, password)


@pytest.mark.parametrize("are_away", [False, True], ids=["refused", "away"])
@every_command
def test_no_command_shows_a_secret_of_any_kind_at_the_level_debug(
    arguments: list[str], are_away: bool, tmp_path: Path, postgres: PostgresServer, rabbitmq: RabbitServer
) -> None:
    ports = (free_port(), free_port()) if are_away else (postgres.port, rabbitmq.port)

    result = Command(tmp_path, **secrets(tmp_path, *ports))(*arguments)

    assert_shows_no_secret(result)


def secrets(folder: Path, database: int, broker: int) -> dict[str, str]:
    """Return variables with a different secret in each place where one may stand; URLs are in files."""
    urls = {
        "RELAY_DATABASE_URL": f"postgresql://app:{SECRETS[0]}@127.0.0.1:{database}/d?sslpassword={SECRETS[1]}",
        "RELAY_BROKER_URL": f"amqp://app:{SECRETS[2]}@127.0.0.1:{broker}/",
        "RELAY_CONSOLE_INBOX_URL": f"host=127.0.0.1 port={database} user=app dbname=d password={SECRETS[3]}",
        "RELAY_CONSOLE_OIDC_CLIENT_SECRET": SECRETS[4],
        "RELAY_TOKEN": SECRETS[5],
    }
    for name, url in urls.items():
        (folder / name).write_text(url + "\n")
    files = {f"{name}_FILE": str(folder / name) for name in urls}
    return files | {
        "RELAY_LOG_LEVEL": "debug",
        "RELAY_DATABASE_CONNECT_TIMEOUT": "2",
        "RELAY_BROKER_CONNECT_TIMEOUT": "1",
        "RELAY_START_TIMEOUT": "1",
    }


def assert_shows_no_secret(result: Result) -> None:
    shown = result.out + result.err
    assert "Traceback" not in shown, shown
    assert [secret for secret in SECRETS if secret in shown] == []


class Echo(BaseHTTPRequestHandler):
    """A server in place of a console, which repeats the token in all that it answers.

    Attributes:
        asked: the addresses.
    """

    asked: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.asked.add(self.path)
        said = self.headers.get("Authorization", "")
        body = json.dumps({"type": "about:blank", "title": said, "status": 401, "detail": said}).encode()
        self.send_response(HTTPStatus.UNAUTHORIZED, said)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  (the library's names)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  (the library's name)
        pass


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_command_shows_the_token_that_a_console_gets(tmp_path: Path, echo: str) -> None:
    for arguments in COMMANDS:
        result = Command(tmp_path, RELAY_TOKEN=SECRETS[5], RELAY_LOG_LEVEL="debug")(*arguments, "--server", echo)
        assert_shows_no_secret(result)

    assert len(Echo.asked) >= 20


@pytest.mark.parametrize("are_away", [False, True], ids=["refused", "away"])
def test_no_process_of_a_server_shows_a_secret(
    are_away: bool, tmp_path: Path, postgres: PostgresServer, rabbitmq: RabbitServer
) -> None:
    ports = (free_port(), free_port()) if are_away else (postgres.port, rabbitmq.port)
    for arguments in (["run"], ["pool", "run"], ["console"]):
        variables = secrets(tmp_path, *ports) | {"RELAY_CONSOLE_LISTEN": f"127.0.0.1:{free_port()}"}
        with Command(tmp_path, **variables).start(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            select([process.stdout, process.stderr], [], [], 60)  # a busy machine starts it slowly
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                shown = Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/comm").read_text()
                assert [secret for secret in SECRETS if secret in shown] == []
                process.terminate()
            out, err = process.communicate(timeout=30)
        assert_shows_no_secret(Result(process.returncode, out, err))
        assert out + err


@every_printable
@pytest.mark.parametrize(("kind", "level"), [("refused", "debug"), ("away", "info")])
def test_a_relay_logs_it_nowhere(
    kind: str, level: str, password: str, tmp_path: Path, postgres: PostgresServer, rabbitmq: RabbitServer
) -> None:
    ports = (postgres.port, rabbitmq.port) if kind == "refused" else (free_port(), free_port())
    database, broker = encoded(password, *(f"127.0.0.1:{port}" for port in ports))
    relay = Command(
        tmp_path,
        RELAY_DATABASE_URL=database,
        RELAY_BROKER_URL=broker,
        RELAY_START_TIMEOUT="1",
        RELAY_LOG_LEVEL=level,
    )

    result = relay.process("run")

    assert result.code == 1
    assert "degraded" in result.err
    assert_no_leak(result, password)


def run(folder: Path, arguments: list[str], database: str, broker: str) -> Result:
    relay = Command(
        folder,
        RELAY_DATABASE_URL=database,
        RELAY_BROKER_URL=broker,
        RELAY_DATABASE_CONNECT_TIMEOUT="2",
        RELAY_BROKER_CONNECT_TIMEOUT="1",
    )
    return relay(*arguments)
