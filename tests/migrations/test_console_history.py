"""0034: the console's figures have a table, and a console whose role was made before may use it."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.earlier_roles import earlier_roles

GRANTS = """
    GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.api_answer TO {relay};
    GRANT SELECT ON outbox.api_answer TO {dashboard};
"""


def test_a_migration_back_and_forth_leaves_the_same(database: DatabaseSettings, connection: Connection) -> None:
    before = description(url_of(database))
    connection.execute("INSERT INTO outbox.console_history (at) VALUES (now())")

    downgrade(database, "0033")
    gone = connection.execute("SELECT to_regclass('outbox.console_history')").fetchone()
    migrate(database)

    assert gone == (None,)
    assert description(url_of(database)) == before


def test_who_keeps_answers_of_the_api_keeps_figures(database: DatabaseSettings, connection: Connection) -> None:
    downgrade(database, "0033")
    with earlier_roles(connection, GRANTS) as roles:
        migrate(database)

        assert roles.rights_on("outbox.console_history") == [["DELETE", "INSERT", "SELECT", "UPDATE"], None]


@pytest.mark.parametrize("figure", ["-1", "'NaN'", "'Infinity'"])
def test_no_figure_is_one_that_cannot_be_drawn(connection: Connection, figure: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(f"INSERT INTO outbox.console_history (at, age_s) VALUES (now(), {figure})".encode())
