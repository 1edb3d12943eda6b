"""Whatever is wrong is one line on stderr, with the remedy, and the exit code says whose turn it is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from psycopg import sql

from relay.cli import main
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import PASSWORD, Command, Result
from tests.operate.rows import Rows

READING = [["status"], ["parked", "list"], ["parked", "retry", "--all"], ["healthcheck"], ["migrate", "--check"]]
every_reader = pytest.mark.parametrize("arguments", READING, ids=" ".join)
EVERY_COMMAND = [*READING, ["migrate"], ["config", "show"], ["run"]]
every_command = pytest.mark.parametrize("arguments", EVERY_COMMAND, ids=" ".join)
WHERE_FOUND = "(`relay config show` tells where it was found)"


def only_line(result: Result) -> str:
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("relay: ")
    return line


def failure(result: Result) -> str:
    """Return the error with which a command that logs JSON has ended."""
    event = json.loads(result.err.splitlines()[-1])
    assert (event["event"], event["level"], event["exit_code"]) == ("relay.failed", "error", result.code)
    return str(event["error"])


@pytest.fixture
def empty_database(postgres: PostgresServer, database_url: str) -> Iterator[str]:
    name = f"empty_{database_url[-12:]}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@every_reader
def test_a_database_without_tables(arguments: list[str], relay: Command, empty_database: str) -> None:
    result = relay(*arguments, RELAY_DATABASE_URL=empty_database)

    assert result.code == 1
    assert "has no outbox tables in schema outbox: run `relay migrate`" in only_line(result)


@every_reader
def test_tables_that_are_behind(arguments: list[str], relay: Command, rows: Rows) -> None:
    rows.connection.execute("UPDATE outbox.migration SET version_num = '0000'")

    result = relay(*arguments)

    assert result.code == 1
    assert only_line(result).endswith("run `relay migrate`")
    assert "are of version 0000, and this release needs" in result.err


@pytest.mark.parametrize("arguments", [*READING, ["migrate"]], ids=" ".join)
def test_a_wrong_password(arguments: list[str], relay: Command, postgres: PostgresServer, database_url: str) -> None:
    url = postgres.url(database_url.rpartition("/")[2], password=PASSWORD)

    result = relay(*arguments, RELAY_DATABASE_URL=url)

    assert result.code == 1
    assert 'password authentication failed for user "postgres"' in only_line(result)
    assert result.err.endswith(f"check the host, database, user and password in database.url {WHERE_FOUND}\n")


@pytest.mark.parametrize("arguments", [*READING, ["migrate"]], ids=" ".join)
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_host_that_cannot_be_reached(host: str, arguments: list[str], tmp_path: Path) -> None:
    url = f"postgresql://u:{PASSWORD}@{host}:{free_port()}/d"

    result = Command(tmp_path, RELAY_DATABASE_URL=url)(*arguments)

    assert result.code == 1
    assert host in only_line(result)
    assert result.err.endswith(f"check the host, database, user and password in database.url {WHERE_FOUND}\n")


def test_run_without_a_database(tmp_path: Path, broker_url: str) -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/d"
    relay = Command(tmp_path, RELAY_DATABASE_URL=url, RELAY_BROKER_URL=broker_url, RELAY_START_TIMEOUT="1")

    result = relay.process("run")

    assert result.code == 1
    assert failure(result).startswith("connection failed")
    assert failure(result).endswith(f"check the host, database, user and password in database.url {WHERE_FOUND}")


def test_run_without_tables(relay: Command, empty_database: str, broker_url: str) -> None:
    result = relay.process("run", RELAY_DATABASE_URL=empty_database, RELAY_BROKER_URL=broker_url)

    assert result.code == 1
    assert "run `relay migrate`" in failure(result)


def test_run_with_tables_that_are_behind(relay: Command, rows: Rows, broker_url: str) -> None:
    rows.connection.execute("UPDATE outbox.migration SET version_num = '0000'")

    result = relay.process("run", RELAY_BROKER_URL=broker_url)

    assert result.code == 1
    assert "run `relay migrate`" in failure(result)


def test_run_without_a_broker(relay: Command) -> None:
    port = free_port()

    result = relay.process("run", RELAY_BROKER_URL=f"amqp://u:{PASSWORD}@127.0.0.1:{port}/", RELAY_START_TIMEOUT="1")

    assert result.code == 1
    assert f"127.0.0.1:{port}" in failure(result)
    assert "broker.url" in failure(result)


@pytest.mark.parametrize("change", ["vhost", "password"])
def test_run_with_a_virtual_host_or_password_that_the_broker_refuses(
    change: str, relay: Command, rabbitmq: RabbitServer
) -> None:
    url = rabbitmq.url("no-such-vhost")
    if change == "password":
        url = f"amqp://guest:{PASSWORD}@{url.rpartition('@')[2]}"

    result = relay.process("run", RELAY_BROKER_URL=url, RELAY_START_TIMEOUT="1")

    assert result.code == 1
    assert "broker.url" in failure(result)


def test_run_on_a_console_ends_with_a_line_for_people(relay: Command, empty_database: str, broker_url: str) -> None:
    result = relay.process(
        "run", RELAY_DATABASE_URL=empty_database, RELAY_BROKER_URL=broker_url, RELAY_LOG_FORMAT="console"
    )

    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("relay: ")
    assert "run `relay migrate`" in result.err.splitlines()[-1]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BaseExceptionGroup("tasks", [RuntimeError("a bug")])])
def test_a_bug_in_a_log_of_json_is_an_event_too(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def raise_it(*_: object) -> NoReturn:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("relay.cli.pool.session", raise_it)

    code = main(["pool", "run"])

    (event,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (code, event["event"], event["exit_code"]) == (1, "relay.failed", 1)
    assert "a bug" in event["exception"]
    assert "Traceback" in event["exception"]


@pytest.mark.parametrize("command", [["run"], ["pool", "run"]], ids=" ".join)
@pytest.mark.parametrize("variable", ["RELAY_LOG_FORMAT", "RELAY_LOG__FORMAT"])
def test_a_wrong_configuration_is_events_where_the_environment_asks_for_json(
    command: list[str], variable: str, tmp_path: Path
) -> None:
    (tmp_path / "relay.toml").write_text("[broker]\nexchnge = 'x'\n")
    relay = Command(tmp_path, RELAY_DATABSE_URL=f"postgresql://u:{PASSWORD}@h/d", **{variable: "json"})

    result = relay.process(*command)

    assert (result.code, result.out) == (2, "")
    events = [json.loads(line) for line in result.err.splitlines()]
    assert {(event["event"], event["level"], event["exit_code"]) for event in events} == {("relay.failed", "error", 2)}
    (variable_told, key_told) = (event["error"] for event in events)
    assert "unknown variable RELAY_DATABSE_URL" in variable_told
    assert "unknown key broker.exchnge" in key_told
    assert PASSWORD not in result.err


@pytest.mark.parametrize("style", ["console", "auto", "jsn"])
def test_a_wrong_configuration_is_lines_for_people_without_that(style: str, tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text("[broker]\nexchnge = 'x'\n")

    result = Command(tmp_path, RELAY_LOG_FORMAT=style).process("run")

    assert result.code == 2
    assert all(line.startswith("relay: ") for line in result.err.splitlines())


@every_command
def test_an_unknown_key_in_the_file_or_the_environment(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[broker]\nexchnge = 'x'\n")
    relay = Command(tmp_path, RELAY_DATABSE_URL=f"postgresql://u:{PASSWORD}@h/d", RELAY_CONFIG="mine.toml")

    result = relay(*arguments)

    assert result.code == 2
    assert result.err.splitlines() == [
        "relay: unknown variable RELAY_DATABSE_URL; did you mean RELAY_DATABASE_URL?",
        "relay: unknown key broker.exchnge (file mine.toml); did you mean broker.exchange?",
    ]


@pytest.mark.parametrize(
    "variables",
    [{"RELAY_DATABASE_URL": f"{PASSWORD}"}, {"RELAY_BROKER_URL": f"http://u:{PASSWORD}@h/"}],
    ids=lambda variables: next(iter(variables)),
)
def test_a_url_that_is_none(variables: dict[str, str], tmp_path: Path) -> None:
    (name,) = variables

    result = Command(tmp_path, **variables)("status")

    assert result.code == 2
    assert f"(variable {name}): it takes" in only_line(result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], 'Unknown command "frob"'),
        (["status", "--nope"], "Unknown option: --nope"),
        (["status", "--interval", "x"], "--interval"),
        (["status", "--output", "yaml"], "--output"),
        (["parked", "retry"], "--all for every row"),
        (["parked", "discard", "--limit", "3"], "--all for every row"),
        (["parked", "retry", "--all", "3"], "exclude each other"),
        (["parked", "show", "abc"], "abc is no id and no message id"),
        (["parked", "show"], "row"),
        (["migrate", "--sql", "--check"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_cannot_be(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = Command(tmp_path)(*arguments)

    assert result.code == 2
    assert words.lower() in only_line(result).lower()


def test_a_role_without_rights(relay: Command, rows: Rows, postgres: PostgresServer, database_url: str) -> None:
    database = database_url.rpartition("/")[2]
    rows.connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'pw'").format(sql.Identifier(database)))
    url = postgres.url(database, user=database, password="pw")
    try:
        read = relay("status", RELAY_DATABASE_URL=url)
        migrated = relay("migrate", RELAY_DATABASE_URL=url)
    finally:
        with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(database)))

    assert (read.code, migrated.code) == (1, 1)
    words = f"permission denied for schema outbox: grant it to role {database} (`relay config roles` prints the roles"
    assert words in only_line(read)
    which_server, refusal = migrated.err.splitlines()
    assert which_server.endswith(f", as user {database}")
    assert "permission denied" in refusal
    assert "run it as the role that owns the tables" in refusal


def test_the_installed_command_does_as_the_tests_do(relay: Command, tmp_path: Path) -> None:
    status = relay.process("status", "-o", "json")
    usage = relay.process("status", "--nope")
    nowhere = Command(tmp_path, RELAY_DATABASE_URL=f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/d")
    unreachable = nowhere.process("status")

    assert (status.code, status.err) == (0, "")
    assert usage.code == 2
    assert only_line(usage) == only_line(relay("status", "--nope"))
    assert unreachable.code == 1
    assert only_line(unreachable) == only_line(nowhere("status"))


def test_a_reader_that_has_seen_enough_gets_no_complaint(relay: Command) -> None:
    with relay.start("status", "--watch", "--interval", "0.1") as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.readline()

        command.stdout.close()

        assert command.wait(30) == 141
        assert command.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("parked list --group last", "--group: String should match pattern '^[0-9a-f]{12}$'"),
        ("parked restore --job 0", "--job: Input should be greater than or equal to 1"),
        ("parked retry --limit -1", "--limit: Input should be greater than or equal to 1"),
        (f"parked retry --reason {'x' * 1001}", "--reason: String should have at most 1000 characters"),
        ("dead-letters retry invoices --job 1", "Unknown option: --job"),
        (f"dead-letters list invoices --since {'9' * 51}", "--since: String should have at most 50 characters"),
        (f"replay --aggregate-id {'x' * 1001}", "--aggregate-id: String should have at most 1000 characters"),
        ("audit list --job none", "--job: Input should be a valid integer"),
    ],
)
def test_a_flag_takes_what_the_request_takes(arguments: str, words: str, relay: Command) -> None:
    result = relay(*arguments.split())

    assert result.code == 2
    assert words in only_line(result)
