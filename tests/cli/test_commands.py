"""Each command, as a user and as a program reads it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import relay as product
from relay.config.keys import all_keys
from relay.engine.send.codec import CODEC
from relay.jobs.job import operator
from relay.operate.messages.whereabouts import WhyMissing
from relay.operate.reference import example
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.cli.command import PASSWORD, Command
from tests.operate.rows import Rows

STATUS_KEYS = {"pending", "in_flight", "parked", "oldest_pending_age_s", "nodes", "published_total", "state", "reasons"}
ESCAPE = "\x1b"
WATCH = ("status", "--watch", "--interval", "0.1", "--output", "json")


def test_version_and_help(tmp_path: Path) -> None:
    relay = Command(tmp_path)

    assert relay("--version").out == f"relay {product.__version__}, codec: {CODEC}\n"
    told = relay("--help")
    assert told.code == 0
    for name in (
        "run",
        "migrate",
        "status",
        "doctor",
        "parked",
        "dead-letters",
        "replay",
        "reconcile",
        "topology",
        "retention",
        "config",
        "healthcheck",
    ):
        assert f"  {name}: " in told.out
        assert relay(name, "--help").code == 0
    assert "Exit codes:" in told.out


def test_status_json_keeps_its_contract(relay: Command, rows: Rows) -> None:
    rows.node(in_flight=3, published_total=10)
    rows.pending()
    rows.parked()

    result = relay("status", "--output", "json")

    status = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert set(status) >= STATUS_KEYS
    assert (status["state"], status["pending"], status["in_flight"], status["parked"]) == ("degraded", 1, 3, 1)
    assert status["published_total"] == 10
    assert isinstance(status["oldest_pending_age_s"], float)
    (node,) = status["nodes"]
    assert (node["name"], node["lanes"], node["alive"]) == ("relay-1", list(range(16)), True)
    assert node["last_heartbeat"].startswith("20")


def test_status_in_a_pipe_is_plain(relay: Command, rows: Rows) -> None:
    rows.node("ev\x1b[31mil")

    result = relay("status")

    lines = [line.split("\t") for line in result.out.splitlines()]
    assert result.code == 0
    assert ["state", "ok"] in lines
    assert ["pending", "0"] in lines
    assert lines[-1][:4] == ["node", "ev\\x1b[31mil", "ok", "0-15"]
    assert ESCAPE not in result.out


def test_watch_goes_on_until_interrupted(relay: Command, rows: Rows) -> None:
    with relay.start(*WATCH) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        rows.pending()
        while json.loads(watching.stdout.readline())["pending"] == first["pending"]:
            pass

        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)

    assert (watching.returncode, err) == (130, "")


def test_watch_outlives_a_lost_database(relay: Command, rows: Rows, postgres: PostgresServer) -> None:
    database = rows.connection.info.dbname
    with psycopg.connect(postgres.admin_url, autocommit=True) as admin, relay.start(*WATCH) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        complaint = watching.stderr.readline()
        admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        watching.stdout.readline()
        watching.stdout.readline()

        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)

    assert complaint.startswith("relay: ")
    assert "not currently accepting connections" in complaint
    assert watching.returncode == 130


def test_migrate_makes_checks_and_drops_the_tables(
    relay: Command, rows: Rows, postgres: PostgresServer, database_url: str
) -> None:
    elsewhere = {"RELAY_DATABASE_SCHEMA": "billing"}

    before = relay("migrate", "--check", **elsewhere)
    done = relay("migrate", **elsewhere)
    again = relay("migrate", **elsewhere)
    after = relay("migrate", "--check", **elsewhere)
    dropped = relay("migrate", "--downgrade", "base", "--yes", "--why", "a test", **elsewhere)

    assert (before.code, done.code, again.code, after.code, dropped.code) == (1, 0, 0, 0, 0)
    assert done.out == again.out == after.out
    assert done.out.startswith("schema billing is of version 0")
    assert "relay.alembic" in done.err
    assert again.err.count("\n") == 1  # which server it is
    assert dropped.out.endswith("schema billing is of version none\n")


def test_migrate_sql_prints_and_connects_to_nothing(tmp_path: Path) -> None:
    result = Command(tmp_path, RELAY_DATABASE_URL=f"postgresql://u:{PASSWORD}@127.0.0.1:1/d")("migrate", "--sql")

    assert (result.code, result.err) == (0, "")
    assert "CREATE TABLE outbox.message (" in result.out


def test_parked_is_listed_shown_retried_and_discarded(relay: Command, rows: Rows) -> None:
    head = rows.parked("a", payload='{"amount": 12}')
    follower = rows.parked("a", behind=head)
    other = rows.parked("b")

    listed = relay("parked", "list")
    shown = relay("parked", "show", str(head))
    foreseen = relay("parked", "retry", "--all", "--dry-run")
    given_up = relay("parked", "discard", "--aggregate-id", "a", "--dry-run")
    discarded = relay("parked", "discard", "--aggregate-id", "a", "--why", "by hand", "--yes")
    retried = relay("parked", "retry", "--all")

    header, *lines = [line.split("\t") for line in listed.out.splitlines()]
    assert header[0] == "id"
    assert [(line[0], line[8]) for line in lines] == [(str(head), "1"), (str(other), "0")]
    assert 'payload\t{"amount": 12}' in shown.out
    assert foreseen.out == "would retry 2 rows, and release 1 held behind them\n"
    assert given_up.out == "would discard 1 row, and release 1 held behind it\n"
    assert given_up.err.splitlines()[0] == f"{head}  invoice  a  InvoiceIssued  returned: no queue is bound"
    assert given_up.err.splitlines()[1].startswith("the oldest is of 20")
    assert discarded.out == "discarded 1 row, and released 1 held behind it\n"
    assert retried.out == "retried 1 row, and released 0 held behind it\n"
    assert {each.code for each in (listed, shown, foreseen, discarded, retried)} == {0}
    assert rows.states() == {head: ("discarded", None), follower: ("pending", None), other: ("pending", None)}


def test_who_retried_a_row_is_shown_when_it_is_parked_again(relay: Command, rows: Rows) -> None:
    row = rows.parked()
    before = relay("parked", "show", str(row)).out
    for named in (["--by", "ada", "--why", "the queue is back"], ["--by", "bob"]):
        assert relay("parked", "retry", "--all", *named).code == 0
        rows.connection.execute("UPDATE outbox.message SET state = 'parked'")

        shown = relay("parked", "show", str(row)).out

        assert f"retried_by\t{named[1]}\n" in shown
        assert f"retry_note\t{''.join(named[3:])}\n" in shown
    assert "retried_by\t\n" in before


def test_who_discards_is_kept_with_the_row(relay: Command, rows: Rows) -> None:
    named, variable, nobody = (rows.parked(key) for key in "abc")
    discard = ("parked", "discard", "--yes", "--why", "by hand")

    assert relay(*discard, str(named), "--by", "ada").code == 0
    assert relay(*discard, str(variable), RELAY_OPERATOR="team billing").code == 0
    assert relay(*discard, str(nobody)).code == 0

    assert "set_aside_by\tada\nset_aside_note\tby hand\n" in relay("parked", "show", str(named)).out
    assert "set_aside_by\tteam billing\n" in relay("parked", "show", str(variable)).out
    assert f"set_aside_by\t{operator()}\n" in relay("parked", "show", str(nobody)).out
    audited = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit ORDER BY id")
    assert audited.fetchall() == [
        ("parked discard", str(row), by, "by hand")
        for row, by in ((named, "ada"), (variable, "team billing"), (nobody, operator()))
    ]


def test_parked_json(relay: Command, rows: Rows) -> None:
    head = rows.parked("a", payload='{"amount": 12}')
    held = rows.parked("a", behind=head)

    listed = json.loads(relay("parked", "list", "--held", "--limit", "1", "-o", "json").out)
    shown = json.loads(relay("parked", "show", str(head), "-o", "json").out)
    foreseen = json.loads(relay("parked", "discard", str(head), "--dry-run", "-o", "json").out)

    assert (listed["total"], [row["id"] for row in listed["rows"]]) == (2, [head])
    assert (shown["payload"], shown["payload_size"]) == ('{"amount": 12}', 14)
    assert foreseen == {
        "chosen": 1,
        "released": 1,
        "not_found": [],
        "job": None,
        "state": "done",
        "keys": 1,
        "failed": 0,
        "waiting": None,
    }
    assert rows.states()[held] == ("parked", head)


def test_a_payload_is_shown_by_show_alone_and_cut_unless_asked(relay: Command, rows: Rows) -> None:
    row = rows.parked(payload=json.dumps("x" * 5000))

    cut = relay("parked", "show", str(row)).out
    full = relay("parked", "show", str(row), "--full").out

    assert "xxx" not in relay("parked", "list", "-o", "json").out
    assert (cut.count("x" * 999), cut.count("x" * 1001), full.count("x" * 5000)) == (1, 0, 1)


def test_exit_codes_of_rows_that_are_not_there(relay: Command, rows: Rows) -> None:
    row = rows.parked()

    partly = relay("parked", "retry", str(row), "12345")
    none = relay("parked", "retry", "12345")
    no_match = relay("parked", "retry", "--event-type", "Nothing")
    shown = relay("parked", "show", "12345")

    assert (partly.code, none.code, no_match.code, shown.code) == (3, 1, 0, 1)
    unknown = f"relay: 12345 is not parked: {WhyMissing.UNKNOWN}\n"
    assert partly.err == f"{unknown}of 1: 1 not sent yet: `relay status` tells why\n"
    assert none.err == unknown
    assert rows.states() == {row: ("pending", None)}


def test_config_show_tells_values_and_origins_without_passwords(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"amqp://u:{PASSWORD}@one/,amqp://u:{PASSWORD}@two/v\n")
    (tmp_path / "relay.toml").write_text('[relay]\nordering = "pipelined"\n[[routes]]\nexchange = "x"\n')
    relay = Command(
        tmp_path,
        RELAY_BROKER_URL_FILE="secret",
        RELAY_DATABASE_SCHEMA="billing",
        RELAY_DATABASE_URL=f"postgresql://u:{PASSWORD}@h/d",
    )

    plain = relay("config", "show", "--database-url", f"postgresql://v:{PASSWORD}@h/d?password={PASSWORD}")
    shown = json.loads(relay("config", "show", "-o", "json").out)

    lines = {line.split("\t")[0]: line.split("\t")[1:] for line in plain.out.splitlines()}
    assert lines["database.url"] == ['"postgresql://v:***@h/d?password=***"', "flag --database-url"]
    assert lines["database.schema"] == ['"billing"', "variable RELAY_DATABASE_SCHEMA"]
    assert lines["broker.url"] == ['"amqp://u:***@one/,amqp://u:***@two/v"', "file secret of RELAY_BROKER_URL_FILE"]
    assert lines["relay.ordering"] == ['"pipelined"', "file relay.toml"]
    assert lines["log.level"] == ['"info"', "default"]
    assert set(shown) == {key.name for key in all_keys()}
    assert shown["database.url"] == {"value": "postgresql://u:***@h/d", "origin": "variable RELAY_DATABASE_URL"}
    assert shown["relay.max_in_flight"]["value"] == 800
    assert shown["routes"]["value"][0]["exchange"] == "x"


def test_config_example_is_the_documented_one(tmp_path: Path) -> None:
    assert Command(tmp_path)("config", "example").out == example()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--node", "fine"], 0, ""),
        (["--node", "fine", "--ready"], 0, ""),
        (["--node", "slow"], 0, ""),
        (["--node", "slow", "--ready"], 1, "relay: relay slow is degraded: broker: no connection\n"),
        (["--node", "none"], 1, "relay: no relay named none has ever written a heartbeat: start `relay run`"),
        (["--node", "dead"], 1, "relay: the last heartbeat of relay dead is 6"),
    ],
)
def test_healthcheck(arguments: list[str], code: int, words: str, relay: Command, rows: Rows) -> None:
    rows.node("fine")
    rows.node("slow", state="degraded", reasons=["broker: no connection"])
    rows.node("dead", age=60)

    result = relay("healthcheck", *arguments)

    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(words)


def test_healthcheck_asks_for_the_node_of_the_settings(relay: Command, rows: Rows) -> None:
    rows.node("fine")

    assert relay("healthcheck", RELAY_NODE="fine").code == 0


def test_run_says_when_it_is_ready_and_drains_on_sigterm(relay: Command, broker_url: str) -> None:
    relay.variables["RELAY_BROKER_URL"] = broker_url
    events = []
    with relay.start("run") as running:
        assert running.stderr is not None
        while "relay.ready" not in events:
            events.append(json.loads(running.stderr.readline())["event"])
        wait_for(lambda: relay("healthcheck", "--ready").code == 0, "the relay's own row says so, too", 30)
        alive = relay("healthcheck", "--ready")
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=30)

    assert alive == type(alive)(0, "", "")
    assert running.returncode == 0
    assert [line for line in err.splitlines() if not isinstance(json.loads(line), dict)] == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("relay.cli", {"relay.engine", "alembic", "sqlalchemy", "psycopg", "aio_pika", "rich"}),
        ("relay.cli.healthcheck", {"relay.engine", "alembic", "sqlalchemy", "aio_pika", "rich"}),  # run all the time
    ],
)
def test_a_command_imports_only_what_it_needs(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {heavy}))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
