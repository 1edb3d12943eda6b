"""What single writers do besides the contract: COPY, schemas, types, what is imported."""

import re
import subprocess
import sys
from typing import Any, assert_type

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate, sqlalchemy_engine
from relay.outbox import Event, OutboxMessage, PayloadTooLargeError, add, add_many, insert
from relay.outbox.row import row_of
from tests.outbox.conftest import MessageTable
from tests.outbox.writers import CHECKED


def event(payload: str = "{}") -> Event:
    return Event("Invoice", "7", "InvoiceIssued", payload)


@pytest.mark.parametrize("writer", [name for name in CHECKED if name.endswith("-copy")])
async def test_many_rows_are_copied(writer: str, module_url: str, table: MessageTable) -> None:
    async with CHECKED[writer](module_url) as transaction:
        await transaction.add(event())

        last = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        assert [row["query"].split()[0] for row in table.execute(last)] == ["COPY"]


@pytest.mark.parametrize("count", [0, 1, 2, 49, 50, 51, 2000])
def test_add_many_writes_any_number_in_order(module_url: str, table: MessageTable, count: int) -> None:
    with psycopg.connect(module_url) as connection:
        add_many(connection, (event(str(number)) for number in range(count)))

    assert [row["payload"] for row in table.rows()] == [str(number) for number in range(count)]


@pytest.mark.parametrize("writer", ["psycopg_connection-add", "psycopg_async_pipeline-add", "asyncpg_session-add"])
async def test_events_beyond_the_size_of_a_statement_go_in_several_in_order(
    writer: str, module_url: str, table: MessageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert, "STATEMENT_BYTES", 100)  # in the place of 16 MiB: a test of 1 GiB takes minutes
    events = [event(str(number) * (number % 7 + 1)) for number in range(10, 60)]

    async with CHECKED[writer](module_url) as transaction:
        await transaction.add(*events)
        await transaction.commit()

    assert [row["payload"] for row in table.rows()] == [each.payload for each in events]


def test_a_statement_holds_no_more_than_its_limit_unless_one_row_alone_does() -> None:
    sizes = [1, 6, 5, 30, 2, 2, 9, 1]
    rows = [row_of(Event("A", "7", "E", b"x" * (size * 1024 * 1024), content_type="text/plain"), None, 2**30)
            for size in sizes]  # fmt: skip

    assert [[len(row.payload_bytes or b"") >> 20 for row in batch] for batch in insert.batches(rows)] == [
        [1, 6, 5],
        [30],
        [2, 2, 9, 1],
    ]


def test_rows_can_be_added_inside_a_block_of_a_connection_in_autocommit_mode(
    module_url: str, table: MessageTable
) -> None:
    with psycopg.connect(module_url, autocommit=True) as connection, connection.transaction(force_rollback=True):
        add(connection, event())

    assert table.rows() == []


def test_a_connection_with_another_kind_of_cursor_is_served(module_url: str, table: MessageTable) -> None:
    with psycopg.connect(module_url, cursor_factory=psycopg.RawCursor) as connection:
        add(connection, event())
        add(connection, event(), event())
        add_many(connection, [event() for _ in range(60)])

    assert len(table.rows()) == 63


def test_the_limit_on_a_payload_can_be_set(module_url: str, table: MessageTable) -> None:
    with psycopg.connect(module_url) as connection:
        with pytest.raises(PayloadTooLargeError):
            add(connection, event("12345"), max_payload_bytes=4)
        with pytest.raises(PayloadTooLargeError):
            add_many(connection, [event("12345")], max_payload_bytes=4)


async def test_events_may_come_in_lists(module_url: str, table: MessageTable) -> None:
    first, second, third, fourth = (event(str(number)) for number in range(4))
    with psycopg.connect(module_url) as connection:
        add(connection, [first, second], third)
        add(connection, [])
    async with await psycopg.AsyncConnection.connect(module_url) as connection_too:
        await add(connection_too, (fourth,))

    assert [row["payload"] for row in table.rows()] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("writer", [name for name in CHECKED if not re.search("mapped|pipeline", name)])
@pytest.mark.parametrize(
    ("before", "note"),
    [
        ("ALTER TABLE outbox.message RENAME TO elsewhere", "`relay migrate` makes the tables of schema outbox"),
        ("ALTER SCHEMA outbox RENAME TO elsewhere", "`relay migrate` makes the tables of schema outbox"),
        ("SET LOCAL ROLE pg_monitor", "the login needs the role outbox_writer of schema outbox"),
    ],
)
async def test_an_error_of_the_database_comes_with_its_remedy(
    writer: str, before: str, note: str, module_url: str, table: MessageTable
) -> None:
    async with CHECKED[writer](module_url) as transaction:
        await transaction.execute(before)
        with pytest.raises(Exception) as raised:  # noqa: PT011  (each driver has another class)
            await transaction.add(event())
        await transaction.rollback()

    assert [each for each in getattr(raised.value, "__notes__", []) if each.startswith(note)] != []


@pytest.mark.parametrize("count", [1, 2, 60])
def test_a_schema_with_a_percent_sign_is_a_name_as_any_other(database: DatabaseSettings, count: int) -> None:
    with psycopg.connect(database.url.get_secret_value()) as connection, pytest.raises(psycopg.errors.Error) as raised:
        add_many(connection, [event() for _ in range(count)], schema="50%s")

    assert "50%s" in str(raised.value)


def test_another_schema_is_written_to(database: DatabaseSettings) -> None:
    events = database.model_copy(update={"schema_name": "events"})
    migrate(events)
    engine = sqlalchemy_engine(database)

    with psycopg.connect(database.url.get_secret_value()) as connection:
        add(connection, event(), schema="events")
        add(connection, event(), event(), schema="events")
        add_many(connection, [event() for _ in range(60)], schema="events")
    with engine.begin() as begun:
        add(begun, event(), schema="events")
        add_many(begun, [event() for _ in range(60)], schema="events")
    with Session(engine.execution_options(schema_translate_map={"outbox": "events"})) as session:
        session.add(OutboxMessage(event()))
        session.commit()

    with psycopg.connect(database.url.get_secret_value()) as connection:
        assert connection.execute("SELECT count(*) FROM events.message").fetchone() == (125,)
        assert connection.execute("SELECT count(*) FROM outbox.message").fetchone() == (0,)


def test_a_mapped_row_reads_back_as_the_text_it_was(module_url: str, table: MessageTable) -> None:
    engine = sa.create_engine(module_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.pool.NullPool)
    message = OutboxMessage(event('{"a" : 1.10}'))
    message_id = message.message_id
    with Session(engine) as session:
        session.add(message)
        session.commit()

    with Session(engine) as session:
        assert session.get_one(OutboxMessage, message_id).payload == '{"a" : 1.10}'


def test_mapped_rows_are_written_in_the_order_of_their_adding(module_url: str, table: MessageTable) -> None:
    engine = sa.create_engine(module_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.pool.NullPool)
    with Session(engine) as session:
        for number in range(30):
            # Rows with other columns set go in other statements: the order must hold across them.
            extra: dict[str, Any] = {} if number % 3 else {"headers": {"n": number}}
            session.add(OutboxMessage(Event("A", "7" if number % 2 else None, "E", str(number), **extra)))
        session.commit()

    assert [row["payload"] for row in table.rows()] == [str(number) for number in range(30)]


def test_something_else_than_a_connection_is_refused() -> None:
    with pytest.raises(TypeError, match="str is no connection or session of psycopg 3, SQLAlchemy, asyncpg or Django"):
        add("postgresql://localhost", event())  # type: ignore[call-overload]


def test_what_must_be_awaited_says_so_in_its_type() -> None:
    """Checked by mypy; the function is never called."""

    async def typed(
        sync: psycopg.Connection, session: Session, connection: psycopg.AsyncConnection, async_session: AsyncSession
    ) -> None:
        add(sync, event())
        add_many(session, [event()])
        add(connection, event())  # type: ignore[unused-coroutine]
        assert_type(await add(connection, event()), None)
        assert_type(await add_many(async_session, [event()]), None)

    assert callable(typed)


def test_users_of_psycopg_import_nothing_else_but_orjson() -> None:
    script = (
        "import sys; from relay.outbox import Event, add, add_many;"
        "heavy = 'aio_pika alembic aiormq cyclopts opentelemetry pydantic rich sqlalchemy structlog yarl'.split();"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[]"
