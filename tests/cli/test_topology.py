"""`relay topology`: what it prints, and what it exits with."""

import json
from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import PASSWORD, Command
from tests.operate.rows import Rows
from tests.support.definitions import definitions

LISTED = """
    [[topology.exchanges]]
    name = "billing"
    [[topology.queues]]
    name = "invoices"
    max_length = 100000
    message_ttl = 60
    [[topology.bindings]]
    exchange = "billing"
    queue = "invoices"
    routing_key = "customer.*"
"""


@pytest.fixture
def relay(tmp_path: Path, broker_url: str) -> Command:
    (tmp_path / "relay.toml").write_text(LISTED)
    return Command(tmp_path, RELAY_BROKER_URL=broker_url)


def test_apply_declares_what_is_missing_and_a_second_time_nothing(
    relay: Command, broker_url: str, rabbitmq: RabbitServer
) -> None:
    first = relay("topology", "apply")
    second = relay("topology", "apply")

    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert first.out.splitlines() == [
        "standing\tkind\tname\twords",
        "declared\texchange\tbilling\t",
        "declared\tqueue\tinvoices\t",
        "bound\tbinding\tbilling -> invoices (customer.*)\t",
    ]
    assert [line.split("\t")[0] for line in second.out.splitlines()] == ["standing", "there", "there", "bound"]
    assert set(definitions(rabbitmq, broker_url).queues) == {"invoices"}


def test_a_dry_run_tells_what_would_be_declared(relay: Command, broker_url: str, rabbitmq: RabbitServer) -> None:
    result = relay("topology", "apply", "--dry-run", "-o", "json")

    assert result.code == 0
    assert json.loads(result.out)[1] == {
        "kind": "queue",
        "name": "invoices",
        "standing": "missing",
        "words": "",
        "remedy": "",
    }
    assert definitions(rabbitmq, broker_url).queues == {}


def test_a_difference_is_1_and_3_when_something_was_declared_beside_it(relay: Command, tmp_path: Path) -> None:
    relay("topology", "apply")
    (tmp_path / "relay.toml").write_text(LISTED.replace("100000", "5"))

    differs = relay("topology", "apply")
    (tmp_path / "relay.toml").write_text(LISTED.replace("100000", "5") + '[[topology.exchanges]]\nname = "new"\n')
    planned = relay("topology", "apply", "--dry-run")
    partly = relay("topology", "apply")
    again = relay("topology", "apply")

    assert [each.code for each in (differs, planned, partly, again)] == [1, 1, 3, 1]
    (line,) = (line for line in differs.out.splitlines() if line.startswith("differs"))
    assert "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'invoices'" in line
    assert "list it as it is, or delete it with its messages" in line
    assert differs.err == "relay: 1 of 3 do not stand as they are listed\n"


@pytest.mark.parametrize("command", ["apply", "show"])
def test_nothing_listed_is_said(command: str, tmp_path: Path, broker_url: str) -> None:
    result = Command(tmp_path, RELAY_BROKER_URL=broker_url)("topology", command)

    assert result.code == 0
    assert result.err.startswith("relay: nothing is listed: ")


def test_a_virtual_host_that_is_missing(relay: Command, rabbitmq: RabbitServer) -> None:
    result = relay("topology", "apply", RELAY_BROKER_URL=rabbitmq.url("no-such-vhost"))

    assert (result.code, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert "check the host, virtual host, user and password in broker.url" in line


def test_a_broker_that_is_not_there(relay: Command) -> None:
    port = free_port()

    result = relay.process("topology", "apply", "--broker-url", f"amqp://u:{PASSWORD}@127.0.0.1:{port}/")

    assert (result.code, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert f"127.0.0.1:{port}" in line


def test_a_listing_that_cannot_be(relay: Command, tmp_path: Path) -> None:
    (tmp_path / "relay.toml").write_text('[[topology.queues]]\nname = "q"\ndurable = false\n')

    result = relay("topology", "apply")

    assert result.code == 2
    assert "topology.queues[0].durable = False (file relay.toml): a quorum queue is always durable" in result.err


def test_show_tells_what_is_listed(relay: Command) -> None:
    result = relay("topology", "show")

    assert result.code == 0
    assert result.out.splitlines()[1:] == [
        "exchange\tbilling\ttopic\tdurable\t{}",
        'queue\tinvoices\tquorum\tdurable\t{ x-queue-type = "quorum", x-max-length = 100000, x-message-ttl = 60000 }',
        "binding\tbilling -> invoices (customer.*)\t\t\t{}",
    ]


def test_what_is_shown_as_json_can_be_imported(
    relay: Command, tmp_path: Path, broker_url: str, rabbitmq: RabbitServer
) -> None:
    file = tmp_path / "definitions.json"
    file.write_text(relay("topology", "show", "-o", "json").out)

    rabbitmq.ctl("import_definitions", str(file))
    imported = definitions(rabbitmq, broker_url)
    result = relay("topology", "apply")

    assert [line.split("\t")[0] for line in result.out.splitlines()[1:]] == ["there", "there", "bound"]
    assert definitions(rabbitmq, broker_url) == imported


def test_apply_with_a_reason_is_audited_and_lets_the_routes_be_tried(
    relay: Command, settings: Settings, rows: Rows
) -> None:
    rows.quarantined("customer.7", exchange="billing")
    rows.quarantined("later")
    rows.connection.execute("UPDATE outbox.quarantine SET probes = 7, probed_at = now()")
    url = settings.database.url.get_secret_value()

    done = relay("topology", "apply", "--why", "the queue was deleted", "--by", "ada", RELAY_DATABASE_URL=url)

    assert (done.code, done.err) == (0, "")
    audit = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit ORDER BY id")
    assert audit.fetchall() == [
        ("topology apply", target, "ada", "the queue was deleted")
        for target in (
            "3 exchanges, queues and bindings that relay.toml lists",
            "exchange billing",
            "queue invoices",
            "binding billing -> invoices (customer.*)",
        )
    ]
    assert rows.connection.execute("SELECT probes FROM outbox.quarantine").fetchall() == [(0,), (0,)]
