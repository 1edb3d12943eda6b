"""The log is JSON unless a person reads it, quiet about the libraries, and never holds a password."""

import asyncio
import io
import json
import logging
import re
from typing import Literal

import aio_pika
import pytest
import structlog
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, LogFormat, LogSettings
from relay.errors import BrokerUnavailableError
from relay.observe.log import set_up
from relay.servers.rabbitmq.connection import connect
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.eventually import eventually
from tests.support.terminal import UNPRINTABLE, Terminal

URL = "amqp://relay:hunter2@broker/"


def test_an_event_is_one_json_object_a_line() -> None:
    output = io.StringIO()
    log = structlog.get_logger("relay.engine")
    set_up(LogSettings(), output)

    log.info("lane.taken", lane=3, waited_ms=4)
    log.debug("batch.published")

    (line,) = output.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "lane.taken", "lane": 3, "waited_ms": 4, "level": "info"}


@pytest.mark.parametrize(
    ("style", "output", "is_json"),
    [
        (LogFormat.AUTO, Terminal(), False),
        (LogFormat.AUTO, io.StringIO(), True),
        (LogFormat.JSON, Terminal(), True),
        (LogFormat.CONSOLE, io.StringIO(), False),
    ],
)
def test_people_read_a_console_and_programs_json(style: LogFormat, output: io.StringIO, is_json: bool) -> None:
    set_up(LogSettings(format=style), output)

    structlog.get_logger().info("relay.ready", lanes=16)

    assert output.getvalue().startswith("{") is is_json
    assert ("\x1b[" in output.getvalue()) is (isinstance(output, Terminal) and not is_json)


@pytest.mark.parametrize(
    ("library", "event"),
    [
        ("aio_pika.connection", "broker.library_warned"),
        ("aiormq.connection", "broker.library_warned"),
        ("psycopg", "database.library_warned"),
        ("psycopg.pool", "database.library_warned"),
        ("sqlalchemy.pool.impl.QueuePool", "database.library_warned"),
        ("alembic.runtime.migration", "schema.library_warned"),
        ("uvicorn.error", "console.library_warned"),
        ("asyncio", "library.warned"),
    ],
)
def test_libraries_are_heard_from_warning_on_under_our_names(library: str, event: str) -> None:
    output = io.StringIO()
    set_up(LogSettings(level="debug"), output)

    logging.getLogger(library).info("frame %r", b"payload")
    logging.getLogger(library).warning("reconnecting to %s", URL)
    structlog.get_logger().debug("batch.published", rows=2)

    warning, debug = [json.loads(line) for line in output.getvalue().splitlines()]
    assert (warning["event"], warning["logger"]) == (event, library)
    assert warning["reason"] == "reconnecting to amqp://relay:***@broker/"
    assert (debug["event"], debug["rows"]) == ("batch.published", 2)


def test_a_line_of_a_library_has_no_address_of_an_object() -> None:
    """An address differs each time, so no search and no alert could count such lines."""
    output = io.StringIO()
    set_up(LogSettings(), output)
    connection = object()

    logging.getLogger("psycopg.pool").warning("discarding broken connection: %s", connection)
    try:
        raise RuntimeError(f"lost by {connection}")
    except RuntimeError:
        logging.getLogger("asyncio").exception("never retrieved: %r", connection)

    pool, task = [json.loads(line) for line in output.getvalue().splitlines()]
    assert pool["reason"] == "discarding broken connection: <object object>"
    assert task["reason"] == "never retrieved: <object object>"
    assert task["exception"].endswith("RuntimeError: lost by <object object>")


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_a_broken_broker_connection_is_one_line_with_a_traceback_at_debug_only(
    broker_url: str, rabbitmq: RabbitServer, level: Literal["info", "debug"]
) -> None:
    output = io.StringIO()
    set_up(LogSettings(level=level, format=LogFormat.CONSOLE), output)
    connection = await aio_pika.connect(broker_url)
    lost = asyncio.Event()
    connection.close_callbacks.add(lambda *_: lost.set())

    rabbitmq.ctl("close_all_connections", "--vhost", broker_url.rpartition("/")[2], "the drill")
    await eventually(lost.is_set, "the connection is lost")
    await connection.close()

    lines = output.getvalue().splitlines()
    assert "Traceback" in output.getvalue() if level == "debug" else all("the drill" in line for line in lines)
    assert all("broker.library_warned" in line and " at 0x" not in line for line in lines if "[warning" in line)
    assert "[warning" in lines[0]
    assert "[error" not in output.getvalue()


@pytest.mark.parametrize(("level", "lines"), [("info", 0), ("debug", 1)])
async def test_a_failed_try_to_connect_is_left_to_the_relay_to_tell(
    level: Literal["info", "debug"], lines: int
) -> None:
    output = io.StringIO()
    set_up(LogSettings(level=level), output)
    nobody = BrokerSettings(url=SecretStr(f"amqp://127.0.0.1:{free_port()}/"))

    with pytest.raises(BrokerUnavailableError):
        await connect(nobody, "test")

    assert len(output.getvalue().splitlines()) == lines, output.getvalue()


def test_what_went_wrong_elsewhere_keeps_its_traceback() -> None:
    output = io.StringIO()
    set_up(LogSettings(), output)

    logging.getLogger("asyncio").error("never retrieved", exc_info=ValueError("a bug"))

    event = json.loads(output.getvalue())
    assert event["level"] == "error"
    assert "ValueError: a bug" in event["exception"]


@pytest.mark.parametrize("style", [LogFormat.CONSOLE, LogFormat.JSON])
def test_no_password_gets_through_a_value_or_a_traceback(style: LogFormat) -> None:
    output = io.StringIO()
    set_up(LogSettings(format=style), output)

    try:
        raise RuntimeError(f"cannot reach {URL}")
    except RuntimeError:
        structlog.get_logger().exception("relay.failed", url=URL, reason=f"cannot reach {URL}")

    assert "RuntimeError" in output.getvalue()
    assert "hunter2" not in output.getvalue()


def test_the_level_is_the_least_that_is_said() -> None:
    output = io.StringIO()
    set_up(LogSettings(level="error"), output)

    structlog.get_logger().warning("broker.degraded")
    logging.getLogger("aio_pika").error("cannot connect")
    structlog.get_logger().error("relay.failed")

    assert [json.loads(line)["event"] for line in output.getvalue().splitlines()] == ["relay.failed"]


@pytest.mark.parametrize("output", [io.StringIO(), Terminal()])
def test_nothing_that_a_terminal_acts_on_gets_onto_a_console(output: io.StringIO) -> None:
    set_up(LogSettings(format=LogFormat.CONSOLE), output)
    log = structlog.get_logger()

    try:
        raise RuntimeError(f"one\n{UNPRINTABLE}")
    except RuntimeError as error:
        log.warning(
            "route.quarantined",
            reason=UNPRINTABLE,
            words=f"no queue {UNPRINTABLE}",
            rows=[UNPRINTABLE],
            error=error,
        )
        log.exception("relay.failed", exc_info=True)
    log.warning("thing.happened", thing=Shouting())
    logging.getLogger("aio_pika").warning("the broker said %s", UNPRINTABLE)
    logging.getLogger("py.warnings").warning("%s", UNPRINTABLE)

    told = re.sub(r"\x1b\[\d*m", "", output.getvalue())  # colours are ours
    assert [char for char in told if not char.isprintable() and char != "\n"] == []
    assert r"\x1b[2J" in told
    assert "RuntimeError: one\n" in told


class Shouting:
    def __repr__(self) -> str:
        return UNPRINTABLE
