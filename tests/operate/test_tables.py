"""The tables on a connection, as every function of an operator gets them."""

import psycopg
import pytest
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError
from relay.operate.held import list_held
from relay.operate.session import open_tables
from relay.servers.postgres.tables import Tables


def test_a_row_that_must_be_there_and_is_not_raises(tables: Tables) -> None:
    with pytest.raises(LookupError, match="gave no row"):
        tables.one(SQL("SELECT id FROM {schema}.message_state"))


def test_a_schema_is_quoted_wherever_a_statement_names_it(connection: psycopg.Connection) -> None:
    statement = Tables(connection, 'a"; b').sql(SQL("SELECT FROM {schema}.{table}"), table=SQL("message"))

    assert statement.as_string(connection) == 'SELECT FROM "a""; b".message'


def test_what_is_composed_already_is_run_as_it_is(tables: Tables) -> None:
    (braces,) = tables.one(tables.sql(SQL("SELECT '{{}}'")))

    assert braces == "{}"


def test_a_missing_table_is_told_in_the_words_of_who_asked(database: DatabaseSettings) -> None:
    elsewhere = database.model_copy(update={"schema_name": "elsewhere"})

    with (
        pytest.raises(SchemaError, match="no held messages in schema elsewhere: run `relay migrate`"),
        open_tables(elsewhere, lack="held messages") as tables,
    ):
        list_held(tables, consumer=None, limit=1)
