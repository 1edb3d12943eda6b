"""Which host takes writes, and what stands next to it."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from relay.config.settings import Settings
from relay.operate.doctor.database import examine_database
from relay.testing.servers.process import free_port
from tests.doctor.findings import FAILED, OK, WARNING, at, look, operator
from tests.support.pair import Pair


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


def test_one_that_takes_writes(settings: Settings) -> None:
    (host,), (primary,) = look(settings, "database.host"), look(settings, "database.primary")

    assert (host.verdict, primary.verdict) == (OK, OK)
    assert host.words.endswith(" takes writes")


def test_nobody_is_there() -> None:
    gone = at(f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    (host,), (primary,) = look(gone, "database.host"), look(gone, "database.primary")

    assert (host.verdict, primary.verdict) == (FAILED, FAILED)


def test_one_of_several_is_away(settings: Settings) -> None:
    url = settings.database.url.get_secret_value()
    place = url.partition("@")[2].partition("/")[0]
    found = at(url.replace(place, f"127.0.0.1:{free_port()},{place}"))

    assert [finding.verdict for finding in look(found, "database.host")] == [WARNING, OK]
    assert look(found, "database.primary")[0].verdict == OK


def test_a_standby_alone_and_beside_its_primary(pair: Pair) -> None:
    (alone,) = look(at(pair.other.admin_url), "database.primary")
    both = list(examine_database(at(pair.url("postgres"))))

    assert (alone.verdict, alone.words) == (FAILED, "no host takes writes")
    states = {finding.words: finding.verdict for finding in both if finding.check == "database.host"}
    assert states == {
        f"127.0.0.1:{pair.primary.port} takes writes": OK,
        f"127.0.0.1:{pair.other.port} is a standby": OK,
    }
    (primary,) = [finding for finding in both if finding.check == "database.primary"]
    assert (primary.verdict, f"127.0.0.1:{pair.primary.port}" in primary.words) == (OK, True)


@pytest.mark.every_postgres
@pytest.mark.parametrize("of", ["ROLE reader", "DATABASE {name}", "ROLE reader IN DATABASE {name}"])
def test_a_login_whose_sessions_are_read_only(settings: Settings, of: str) -> None:
    """The doctor names the setting and whose it is; its remedy lets the login write."""
    url = settings.database.url.get_secret_value()
    login = url.replace(url.partition("://")[2].partition("@")[0], "reader:reader")
    whose = of.format(name=urlsplit(url).path[1:])
    with operator(settings) as connection:
        connection.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        try:
            connection.execute(f"ALTER {whose} SET default_transaction_read_only = on".encode())
            (host,), (primary,) = look(at(login), "database.host"), look(at(login), "database.primary")
            remedy, _, _ = primary.remedy.partition(";")
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(remedy.encode())
            (after,) = look(at(login), "database.primary")
        finally:
            connection.execute("DROP ROLE reader")

    assert host.words.endswith(" is read only: default_transaction_read_only is on")
    assert primary.verdict == FAILED
    assert primary.words == "no host takes writes: default_transaction_read_only is on for this login"
    assert remedy == f"ALTER {whose} RESET default_transaction_read_only"
    assert after.verdict == OK


def test_a_url_whose_sessions_are_read_only(settings: Settings) -> None:
    url = settings.database.url.get_secret_value()
    (primary,) = look(at(f"{url}?options=-cdefault_transaction_read_only%3Don"), "database.primary")

    assert primary.verdict == FAILED
    assert primary.remedy.startswith("take it out of the options in database.url")


@pytest.mark.drills
def test_a_split() -> None:
    """A standby is promoted while its primary lives; the doctor names the split."""
    with Pair() as parted:
        parted.promote()  # and what was the primary lives on

        (primary,) = look(at(parted.url("postgres").partition("?")[0]), "database.primary")

    assert primary.verdict == FAILED
    assert "take writes: a split" in primary.words
