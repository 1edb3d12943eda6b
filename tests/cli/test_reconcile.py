"""`relay reconcile`: what it prints, its exit codes, and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.messages.whereabouts import WhyMissing
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from tests.cli.command import PASSWORD, Command
from tests.operate.inboxes import HOUR, Ends
from tests.support import pgbouncer
from tests.support.pgbouncer import PgBouncer, PoolMode
from tests.support.roles import granted_roles

KEYS = {
    "": {
        *("since", "until", "expected_until", "kept_from", "rows", "consumers", "differences", "mend"),
        *("duplicates", "duplicates_first", "repeated_keys", "repeated_keys_first"),
    },
    "rows": {"day", "state", "rows"},
    "consumers": {
        "consumer",
        "expected",
        "applied",
        "missing",
        "lost",
        "lost_from",
        "lost_until",
        "missing_first",
        "lost_first",
        "dead",
        "event_types",
        "queues",
    },
    "missing_first": {"message_id", "id", "sent_at"},
    "lost_first": {"message_id", "processed_at"},
    "duplicates_first": {"message_id", "rows"},
    "repeated_keys_first": {"consumer", "business_key", "messages"},
    "mend": {"command", "is_exact"},
}
MESSAGE_ID = "SELECT message_id FROM outbox.message WHERE id = %s"


@pytest.fixture
def ends(database: DatabaseSettings) -> Iterator[Ends]:
    """What was sent and what was applied, in one database."""
    both = Ends(database, database)
    yield both
    both.close()


@pytest.fixture
def roles(ends: Ends) -> Iterator[None]:
    """The roles of `config/roles.sql`."""
    with granted_roles(ends.inbox):
        yield


def test_no_difference_exits_with_0(relay: Command, ends: Ends) -> None:
    ends.apply(ends.send(3))

    ended = relay("reconcile", "--since", "2h")

    lines = [line.split("\t") for line in ended.out.splitlines()]
    assert (ended.code, ended.err) == (0, "")
    assert lines[-1] == ["consumer", "billing", "3", "3", "0", "0", "0"]
    assert {line[0] for line in lines} == {"since", "until", "expected_until", "rows", "consumer"}


def test_a_difference_exits_with_1_and_tells_the_command(relay: Command, ends: Ends) -> None:
    sent = ends.send(3)
    ends.apply(sent[1:])

    ended = relay("reconcile", "--since", "2h")

    lines = [line.split("\t") for line in ended.out.splitlines()]
    assert ended.code == 1
    assert ended.err == "relay: 1 of 3 that were sent are not in the inbox of billing\n"
    assert ["missing", "billing", str(sent[0])] in [line[:3] for line in lines]
    assert lines[-1][0] == "mend"
    assert lines[-1][1].startswith("relay replay --since ")
    assert lines[-1][1].endswith(f" {sent[0]}")


def test_it_says_where_a_named_message_is_that_is_not_compared(relay: Command, ends: Ends) -> None:
    (compared,), (earlier,), unknown = ends.send(), ends.send(ago=3 * HOUR), uuid4()
    ends.apply([compared])
    parked = ends.rows.parked()
    message_id = ends.rows.connection.execute(MESSAGE_ID, [parked]).fetchone()

    ended = relay("reconcile", "--since", "2h", *map(str, (compared, earlier, unknown, *(message_id or ()))))

    told = {line.partition(" is not compared: ")[0]: line for line in ended.err.splitlines() if "compared: " in line}
    assert set(told) == {str(earlier), str(unknown), *map(str, message_id or ())}
    assert sorted(words.partition("compared: ")[2][:15] for words in told.values()) == [
        "it is parked: s",
        "it was sent at ",
        "no row of the o",
    ]
    assert told[str(unknown)].endswith(WhyMissing.UNKNOWN)


def test_json_keeps_its_keys(relay: Command, ends: Ends) -> None:
    sent = ends.send(5)
    ends.send(ids=sent[:1])
    ends.apply(sent[1:4], business_key="k")
    ends.apply([uuid4()])
    ends.rows.parked()

    ended = relay("reconcile", "--since", "2h", "--unique-business-key", "--output", "json")

    report = json.loads(ended.out)
    assert ended.code == 1
    assert set(report) == KEYS[""]
    assert set(report["mend"]) == KEYS["mend"]
    (billing,) = report["consumers"]
    for name, found in {**report, **billing}.items():
        if name in KEYS and name != "mend":
            assert [set(each) for each in found] == [KEYS[name]] * len(found) != [], name
    assert (billing["expected"], billing["missing"], billing["lost"], report["duplicates"]) == (5, 2, 1, 1)
    assert len(report["differences"]) == len(ended.err.splitlines()) == 5
    assert {UUID(each["message_id"]) for each in billing["missing_first"]} == {sent[0], sent[4]}


def test_the_command_finds_the_same_settings_and_says_no_password(
    relay: Command, ends: Ends, database_url: str, tmp_path: Path
) -> None:
    ends.send(60, event_type="it's")
    file = tmp_path / "my relay.toml"
    file.write_text("")

    ended = relay(
        *("reconcile", "--since", "2h", "--consumer", "billing", "--event-type", "it's", "--output", "json"),
        *("--config", str(file), "--database-url", database_url),
    )

    command = json.loads(ended.out)["mend"]["command"]
    assert command.startswith(f"relay replay --config '{file}' --database-url ")
    assert ":***@" in command
    assert command.endswith(""" '--event-type=it'"'"'s'""")


def test_it_says_from_which_day_on_rows_are_kept(relay: Command, ends: Ends) -> None:
    ends.apply(ends.send())

    ended = relay("reconcile", "--since", "400d")

    assert ended.code == 0
    assert "(UTC) on; nothing older can be compared" in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--since"),
        (["--since", "yesterday"], "takes a moment such as"),
        (["--since", "1h", "--until", "2h"], "is not before --until 2h"),
        (["--since", "1h", "--grace", "soon"], "--grace takes a length of time such as 90s"),
        (["--since", "1h", "--grace", "99999999999d"], "--grace takes a length of time such as 90s"),
        (["--since", "1h", "--limit", "0"], "limit"),
        (["--since", "1h", "--inbox", f"http://u:{PASSWORD}@h/d"], "--inbox takes a libpq URL"),
        (["--since", "1h", "--inbox-schema", "No"], "--inbox-schema takes"),
    ],
)
def test_what_cannot_be_asked(relay: Command, arguments: list[str], words: str) -> None:
    ended = relay("reconcile", *arguments)

    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_an_inbox_that_cannot_be_reached(relay: Command) -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/d"

    ended = relay("reconcile", "--since", "1h", "--inbox", url)

    assert ended.code == 1
    assert ended.err.startswith("relay: --inbox: connection failed")
    assert ended.err.endswith("; check the host, database, user and password that it names\n")


def test_a_database_without_an_inbox(relay: Command, postgres: PostgresServer) -> None:
    elsewhere = relay("reconcile", "--since", "1h", "--inbox", postgres.admin_url)
    other_schema = relay("reconcile", "--since", "1h", "--inbox-schema", "billing")

    assert (elsewhere.code, other_schema.code) == (1, 1)
    assert "database postgres has no table processed_message in schema outbox: run `relay migrate`" in elsewhere.err
    assert "has no table processed_message in schema billing" in other_schema.err


@pytest.mark.usefixtures("roles")
def test_the_roles_that_are_meant_to_may(relay: Command, ends: Ends, database_url: str) -> None:
    ends.apply(ends.send())
    as_relay, as_consumer, as_writer = (
        f"{database_url}?options=-crole%3Doutbox_{role}" for role in ("relay", "consumer", "writer")
    )

    alone = relay("reconcile", "--since", "2h", RELAY_DATABASE_URL=as_relay)
    apart = relay("reconcile", "--since", "2h", "--inbox", as_consumer, RELAY_DATABASE_URL=as_relay)
    no_table = relay("reconcile", "--since", "2h", RELAY_DATABASE_URL=as_consumer)
    no_inbox = relay("reconcile", "--since", "2h", "--inbox", as_writer, RELAY_DATABASE_URL=as_relay)

    assert (alone.code, apart.code, no_table.code, no_inbox.code) == (0, 0, 1, 1), alone.err + apart.err
    assert "permission denied for table migration: grant it to role" in no_table.err
    assert "permission denied for table processed_message: grant it to role" in no_inbox.err
    assert no_inbox.err.endswith("or name another in --inbox\n")


def test_it_ends_in_words_when_a_database_takes_too_long(
    relay: Command, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.apply(ends.send())
    monkeypatch.setattr("relay.cli.reconcile.SCAN_TIMEOUT", 0.2)

    with psycopg.connect(ends.inbox.info.dsn, password=ends.inbox.info.password) as other:
        other.execute("LOCK TABLE outbox.processed_message")
        ended = relay("reconcile", "--since", "2h")

    assert (ended.code, ended.err) == (1, "relay: PostgreSQL: no answer within 0.2 s\n")


@pytest.mark.skipif(not pgbouncer.is_installed(), reason="PgBouncer is not installed")
def test_a_pooler_that_lends_sessions_out_is_refused(
    relay: Command, postgres: PostgresServer, database_url: str
) -> None:
    with PgBouncer(postgres, PoolMode.TRANSACTION) as pooler:
        url = pooler.url(database_url)
        inbox = relay("reconcile", "--since", "1h", "--inbox", url)
        outbox = relay("reconcile", "--since", "1h", RELAY_DATABASE_URL=url)

    assert (inbox.code, outbox.code) == (2, 2)
    assert inbox.err.startswith("relay: --inbox leads to a pooler that lends sessions out")
    assert outbox.err.startswith("relay: database.url (RELAY_DATABASE_URL) leads to a pooler")
