"""The checklist as a whole, as `relay doctor` prints it."""

import json
from collections import Counter
from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.servers.postgres.compatibility import head_revision
from tests.cli.command import Command

NOWHERE = "postgresql://postgres@127.0.0.1:1/none"


@pytest.fixture
def relay(tmp_path: Path, settings: Settings) -> Command:
    return Command(
        tmp_path,
        RELAY_DATABASE_URL=settings.database.url.get_secret_value(),
        RELAY_BROKER_URL=settings.broker.url.get_secret_value(),
    )


def test_nothing_fails_where_everything_is_there(relay: Command) -> None:
    result = relay("doctor", "--output", "json")

    told = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert [each for each in told["findings"] if each["verdict"] == "failed"] == []
    assert {each["check"].partition(".")[0] for each in told["findings"]} >= {"database", "broker"}


def test_without_a_database_its_checks_are_skipped_and_the_broker_is_looked_at(relay: Command) -> None:
    result = relay("doctor", RELAY_DATABASE_URL=NOWHERE)

    lines = [line.split("\t") for line in result.out.splitlines()]
    verdicts = {check: verdict for verdict, check, _, _ in lines}
    assert result.code == 1
    assert verdicts["database.host"] == "failed"
    assert verdicts["database.tables"] == "skipped"
    assert verdicts["broker.host"] == "ok"
    counts = Counter(verdict for verdict, _, _, _ in lines[:-1])
    assert lines[-1] == [
        "failed",
        "summary",
        f"{counts['failed']} failed, {counts['warning']} warning, {counts['ok']} ok, {counts['skipped']} skipped",
        "",
    ]


def test_an_empty_database_fails_with_the_remedy(relay: Command, settings: Settings) -> None:
    result = relay("doctor", RELAY_DATABASE_SCHEMA="elsewhere")

    assert result.code == 1
    assert (
        f"failed\tdatabase.tables\tschema elsewhere is of version none; this release needs {head_revision()}\t"
        "run `relay migrate`, or check database.schema\n"
    ) in result.out


def test_a_password_in_an_open_relay_toml_is_told_even_where_a_variable_overrides_it(relay: Command) -> None:
    file = relay.folder / "relay.toml"
    file.write_text('[broker]\nurl = "amqps://relay:hunter2@rabbit/"\n')
    file.chmod(0o644)

    result = relay("doctor")

    assert "warning\tsettings.secret_files\tevery user of this host can read or change relay.toml" in result.out
