"""What libpq is told: defaults that the URL overrides, and which host comes last."""

import pytest
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.servers.postgres.database import Host, conninfo


@pytest.mark.parametrize(
    ("url", "last", "hosts", "ports"),
    [
        ("postgresql://u@a:1,b:2,c:3/d", None, "a,b,c", "1,2,3"),
        ("postgresql://u@a:1,b:2,c:3/d", Host("a", 1), "b,c,a", "2,3,1"),
        ("postgresql://u@a:1,a:2/d", Host("a", 2), "a,a", "1,2"),
        ("postgresql://u@a:1,a:2/d", Host("a", 1), "a,a", "2,1"),
        ("postgresql://u@a,b/d", Host("a", 5432), "b,a", ","),
        ("postgresql://u@/d?host=a,b&port=7", Host("a", 7), "b,a", "7"),
        ("postgresql://u@a:1,b:2/d", Host("elsewhere", 1), "a,b", "1,2"),
        ("postgresql://u@a/d", Host("a", 5432), "a", "5432"),
    ],
)
def test_the_host_of_the_lost_session_is_tried_last(url: str, last: Host | None, hosts: str, ports: str) -> None:
    told = conninfo_to_dict(conninfo(DatabaseSettings(url=SecretStr(url)), last=last))

    assert (told["host"], told["port"]) == (hosts, ports)


@pytest.mark.parametrize(
    ("url", "attributes"),
    [
        ("postgresql://u@a,b/d", "read-write"),
        ("postgresql://u@a,b/d?target_session_attrs=any", "any"),
        ("postgresql://u@a/d", None),
    ],
)
def test_of_several_hosts_the_one_that_takes_writes_is_meant(url: str, attributes: str | None) -> None:
    told = conninfo_to_dict(conninfo(DatabaseSettings(url=SecretStr(url))))

    assert told.get("target_session_attrs") == attributes


def test_the_url_overrides_the_deadlines() -> None:
    told = conninfo_to_dict(conninfo(DatabaseSettings(url=SecretStr("postgresql://u@a/d?tcp_user_timeout=60000"))))

    assert (told["tcp_user_timeout"], told["keepalives_idle"]) == ("60000", "5")
