"""The relay's role: each right that it needs is asked for, and a missing one is named as the GRANT that mends it."""

import re
import secrets
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from relay.config.settings import Settings
from relay.operate.doctor.rights import GRANTS, Grant
from relay.testing.servers.postgres import PostgresServer
from tests.doctor.findings import FAILED, OK, SKIPPED, WARNING, at, look, operator
from tests.support.roles import SCRIPT, granted_roles

CHECK = "database.rights"
PASSWORD = "relay-2"


@pytest.fixture
def relay(settings: Settings, postgres: PostgresServer) -> Iterator[Settings]:
    """Settings with a login that has the relay's role, and nothing else."""
    name = f"relay_{secrets.token_hex(6)}"
    with operator(settings) as connection, granted_roles(connection, name):
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE outbox_relay".encode())
        url = urlsplit(settings.database.url.get_secret_value())
        yield at(f"postgresql://{name}:{PASSWORD}@127.0.0.1:{postgres.port}{url.path}")


def user_of(settings: Settings) -> str:
    return urlsplit(settings.database.url.get_secret_value()).username or ""


def granted_by_the_script() -> set[tuple[str, str, tuple[str, ...]]]:
    """Return (privilege, object, columns) of what config/roles.sql grants to the relay."""
    found = set()
    for grant in re.findall(r"^GRANT ([^;]*?) TO ([^;]*);", SCRIPT, re.MULTILINE | re.DOTALL):
        what, to = grant
        if "outbox_relay" not in to or " ON " not in what:
            continue
        privileges, _, objects = " ".join(what.split()).partition(" ON ")
        names, _, columns = privileges.partition(" (")
        split = [objects] if "(" in objects else objects.split(", ")
        for name in split:
            bare = re.sub(r"^(SCHEMA|SEQUENCE|FUNCTION) ", "", name).removeprefix("outbox.")
            for privilege in names.split(", "):
                found.add((privilege, bare, tuple(columns.rstrip(")").split(", ")) if columns else ()))
    return found


def test_the_list_is_that_of_the_script() -> None:
    assert {(each.privilege, each.name or "outbox", each.columns) for each in GRANTS} == granted_by_the_script()


@pytest.mark.every_postgres
def test_the_role_of_the_script_lacks_nothing(relay: Settings) -> None:
    (finding,) = look(relay, CHECK)

    assert finding.verdict == OK


@pytest.mark.parametrize("grant", GRANTS, ids=lambda grant: f"{grant.privilege}-{grant.name}")
def test_a_right_that_was_taken_away_is_named(relay: Settings, settings: Settings, grant: Grant) -> None:
    # From PUBLIC, too, which has EXECUTE on a function unless it was taken away.
    taken = grant.statement("outbox", "outbox_relay, PUBLIC").replace("GRANT", "REVOKE", 1).replace(" TO ", " FROM ")
    with operator(settings) as connection:
        connection.execute(taken.encode())

    (finding,) = look(relay, CHECK)

    assert finding.verdict == (FAILED if grant.command == "run" else WARNING)
    assert f"`relay {grant.command}`" in finding.words
    assert grant.statement("outbox", user_of(relay)) in finding.remedy.split("; ")


@pytest.mark.every_postgres
def test_the_remedy_mends_it(relay: Settings, settings: Settings) -> None:
    with operator(settings) as connection:
        connection.execute("REVOKE ALL ON outbox.message, outbox.node FROM outbox_relay")
        connection.execute("REVOKE USAGE ON SCHEMA outbox FROM outbox_relay")
        (before,) = look(relay, CHECK)
        connection.execute(before.remedy.encode())

        (after,) = look(relay, CHECK)

    assert (before.verdict, after.verdict) == (FAILED, OK)


def test_without_tables_there_is_nothing_to_be_granted(settings: Settings) -> None:
    elsewhere = settings.model_copy(
        update={"database": settings.database.model_copy(update={"schema_name": "elsewhere"})}
    )

    (finding,) = look(elsewhere, CHECK)

    assert finding.verdict == SKIPPED


@pytest.mark.every_postgres
def test_who_may_drop_days(relay: Settings, settings: Settings) -> None:
    check = "database.ownership"
    off = relay.model_copy(update={"relay": relay.relay.model_copy(update={"retention": "off"})})
    (before,) = look(relay, check)
    (nothing_to_drop,) = look(off, check)
    with operator(settings) as connection:
        connection.execute(before.remedy.partition(";")[0].encode())

    (after,) = look(relay, check)

    assert (before.verdict, nothing_to_drop.verdict, after.verdict) == (WARNING, SKIPPED, OK)
    assert "may not call outbox.drop_sent_day(date, boolean, boolean), outbox.drop_inbox_day" in before.words
