"""`python -m tests.console.screenshots`: make the pictures of docs/console.md again, from real servers and relays."""

import asyncio
import math
import sys
import tempfile
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from signal import SIGTERM

import aio_pika
import psycopg
from PIL import Image
from playwright.async_api import Page, async_playwright
from pydantic import SecretStr

from relay.config.settings import Authentication, BrokerSettings, DatabaseSettings, Settings
from relay.console.access.passwords import PasswordFile
from relay.operate.operation import Role
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import Process
from relay.testing.servers.rabbitmq import RabbitServer
from tests.cli.command import RELAY, Command
from tests.console.site import PASSWORD, serving
from tests.console.windows import CHROMIUM, log_in
from tests.support.queues import declare_bound
from tests.support.releases import NEWEST

FOLDER = Path(__file__).parents[2] / "docs"
SECONDS = 90  # of traffic, for the curves
USER = "ada"
WIDTH, HEIGHT, COLOURS = 1280, 760, 128
MAX_BYTES = 20_000  # of a payload

TRAFFIC = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', (1000 + 500 * random())::int::text,
        (ARRAY['InvoiceIssued', 'InvoicePaid', 'PaymentFailed'])[1 + floor(3 * random())::int],
        json_build_object('amount', number) FROM generate_series(1, %s) AS number
"""
TOO_LARGE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', customer::text, 'StatementIssued', to_json(CASE WHEN number = 1 THEN repeat('x', %s) ELSE '' END)
    FROM generate_series(2001, 2004) AS customer, generate_series(1, 12) AS number ORDER BY number
"""
NO_QUEUE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    SELECT 'customer', number::text, 'InvoicePaid', '{}', 'reports', 'invoice.paid' FROM generate_series(1, 5) AS number
"""
APPLY = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT 'billing', message_id, (created_at AT TIME ZONE 'UTC')::date FROM outbox.message WHERE state = 'sent'
"""


async def main() -> int:
    """Start servers, two relays and a console; write for a while; take the pictures."""
    with ExitStack() as running, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        postgres = running.enter_context(PostgresServer(NEWEST))
        rabbitmq = running.enter_context(RabbitServer(schedulers=1))
        url, broker_url = postgres.create_database("console"), rabbitmq.url()
        settings = Settings(
            database=DatabaseSettings(url=SecretStr(url)), broker=BrokerSettings(url=SecretStr(broker_url))
        )
        migrate(settings.database)
        await _declare(broker_url)
        environment = {"RELAY_DATABASE_URL": url, "RELAY_BROKER_URL": broker_url}
        for node in ("relay-0", "relay-1"):
            command = Command(folder, **environment, RELAY_NODE=node, RELAY_MAX_MESSAGE_BYTES=str(MAX_BYTES))
            log = folder / f"{node}.log"
            process = Process([RELAY, "run"], log=log, environment=command.environment({}), folder=folder)
            running.callback(process.stop, SIGTERM)
        users = PasswordFile(folder / "users")
        users.put(USER, Role.OPERATOR, PASSWORD)
        async with serving(settings, authentication=Authentication.PASSWORD, users=str(users.path)) as address:
            await _take(address, asyncio.create_task(asyncio.to_thread(_write, url)))
    return 0


async def _declare(url: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await declare_bound(channel, "billing")
        await channel.declare_exchange("reports", aio_pika.ExchangeType.TOPIC, durable=True)


def _write(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_sleep(2)")
        connection.execute(TOO_LARGE, [MAX_BYTES])
        connection.execute(NO_QUEUE)
        for second in range(SECONDS):
            connection.execute(TRAFFIC, [int(40 + 25 * math.sin(second / 9))])
            connection.execute("SELECT pg_sleep(1)")
        connection.execute(APPLY)


async def _take(address: str, writing: asyncio.Task[None]) -> None:
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        await page.goto(address)
        await log_in(page, USER)
        await asyncio.wait([writing], timeout=SECONDS - 5)
        await _picture(page, "console")  # while rows come
        await writing
        await page.goto(f"{address}/failures")
        await page.locator("tr", has_text="parked").locator("a").first.click()
        await _picture(page, "console-failure")
        await page.goto(f"{address}/nodes")
        await _picture(page, "console-nodes")
        await page.goto(f"{address}/messages?state=sent&event=InvoicePaid")
        await page.locator("tbody a").first.click()
        await _picture(page, "console-message")
        await chromium.close()


async def _picture(page: Page, name: str) -> None:
    await page.wait_for_selector("main h1")
    taken = Image.open(BytesIO(await page.screenshot()))
    taken.quantize(COLOURS).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
