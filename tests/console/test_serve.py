"""The process: it listens, and ends when it is told to."""

import asyncio
import signal
import socket
import subprocess
from pathlib import Path

import httpx

from relay.config.settings import Settings
from relay.runtime.listen import listen
from relay.testing.servers.process import free_port, is_listening
from tests.cli.command import RELAY, Command
from tests.support.eventually import eventually


async def test_it_prints_its_address_and_ends_with_0_while_a_page_is_open(settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    environment = Command(
        tmp_path,
        RELAY_DATABASE_URL=settings.database.url.get_secret_value(),
        RELAY_BROKER_URL=settings.broker.url.get_secret_value(),
        RELAY_CONSOLE_LISTEN=f"127.0.0.1:{port}",
    ).environment({})

    async def listens() -> bool:
        return is_listening(port)

    process = await asyncio.create_subprocess_exec(
        RELAY, "console", env=environment, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        await eventually(listens, "the console listens", 60)
        assert process.stdout is not None
        printed = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        address = printed.removeprefix("open ").strip()
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            # The cookie is for https alone, but for browsers on loopback.
            client.stream("GET", "/live", headers={"Cookie": await session(client, address)}) as stream,
        ):
            lines = stream.aiter_lines()
            assert (await anext(lines)) == "event: beat"
            process.send_signal(signal.SIGTERM)
            async for _ in lines:
                pass
        _, log = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0, log.decode()
    assert b"console.listening" in log
    assert address.startswith(f"http://127.0.0.1:{port}/?token=")
    assert address.partition("=")[2] not in log.decode()


async def session(client: httpx.AsyncClient, address: str) -> str:
    """Return the header `Cookie` of a browser that has opened the address."""
    return (await client.get(address)).headers["Set-Cookie"].partition(";")[0]


async def test_no_part_of_an_answer_waits_until_the_browser_has_got_the_one_before() -> None:
    sends_at_once = asyncio.get_running_loop().create_future()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        sends_at_once.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1:0", waiting=1)
    async with await asyncio.start_server(connected, sock=listener):
        with socket.create_connection(listener.getsockname()):
            assert await sends_at_once == 1


def test_an_address_that_is_taken_is_told(tmp_path: Path, settings: Settings) -> None:
    database, broker = (each.url.get_secret_value() for each in (settings.database, settings.broker))
    command = Command(tmp_path, RELAY_DATABASE_URL=database, RELAY_BROKER_URL=broker)

    result = command("console", RELAY_CONSOLE_LISTEN="203.0.113.1:8420", RELAY_CONSOLE_ORIGIN="https://relay.test",
                     RELAY_CONSOLE_AUTHENTICATION="proxy", RELAY_CONSOLE_TRUSTED_PROXIES="203.0.113.2",
                     RELAY_CONSOLE_OWNER_GROUPS="sre")  # fmt: skip

    assert result.code == 2
    assert "console.listen = 203.0.113.1:8420" in result.err


def test_users_are_added_listed_and_removed_by_commands(tmp_path: Path) -> None:
    command = Command(tmp_path, RELAY_CONSOLE_USERS=str(tmp_path / "users"))
    run = ["console", "user", "add", "ada", "--role", "owner"]
    added = subprocess.run(
        [RELAY, *run], input="correct horse battery\n", env=command.environment({}), cwd=tmp_path, text=True,
        capture_output=True, check=False,
    )  # fmt: skip

    listed = command("console", "user", "list")
    removed = command("console", "user", "remove", "ada")
    again = command("console", "user", "remove", "ada")

    assert added.returncode == 0, added.stderr
    assert listed.out == "name\trole\nada\towner\n"
    assert removed.code == 0
    assert (again.code, "has no user ada" in again.err) == (1, True)
