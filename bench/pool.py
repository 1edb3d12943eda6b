"""How long a partition waits when its member goes: `python -m bench.pool`. See docs/benchmarks.md.

Two members of a pool with the default time-outs take what a relay sends; one of them is killed, frozen or stopped in
order. Measured is the time until the last of its partitions flows again, in the hands of the other one.
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import structlog
from cyclopts import App
from pydantic import SecretStr

from bench.frame import report
from bench.frame.command import CountOrNone, main
from bench.frame.error import BenchmarkError
from bench.frame.servers import Servers, private_servers
from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.consume.pool.stand import Stand, standing

app = App(name="python -m bench.pool", help="Measure how soon a pool's partitions flow again.", version_flags=[])
console = report.open_console()

RATE = 600  # messages a second, of 40 keys
BEFORE = 1.0  # seconds of load before a member goes
WITHIN = 30.0  # seconds

NOW = "SELECT clock_timestamp()"
HELD = "SELECT DISTINCT partition FROM applied WHERE member = %(member)s AND at > %(now)s - interval '1 second'"
FLOWS_AGAIN = """
    SELECT count(*), extract(epoch FROM max(first) - %(since)s)::float8
    FROM (
        SELECT min(at) AS first FROM applied
        WHERE partition = ANY(%(partitions)s) AND member <> %(member)s AND at > %(since)s GROUP BY partition
    ) AS again
"""


class Going(StrEnum):
    """What becomes of one of two members."""

    KILLED = "member killed"
    FROZEN = "member frozen"
    STOPPED = "member stopped in order"


STRIKES = {Going.KILLED: signal.SIGKILL, Going.FROZEN: signal.SIGSTOP, Going.STOPPED: signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Gap:
    """One round; seconds from the strike until the last of the member's partitions flows again."""

    going: Going
    gap: float


@app.default
def pool(*, killed: CountOrNone = 10, frozen: CountOrNone = 3, stopped: CountOrNone = 5) -> int:
    """Print a table; write JSON to bench/results/. Exit code 1 when a message was lost, doubled or out of order.

    Parameters
    ----------
    killed, frozen, stopped
        How often one of two members is killed, frozen or stopped in order; 0 leaves it out.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # of the declarations
    rounds = [going for going, times in zip(Going, (killed, frozen, stopped), strict=True) for _ in range(times)]
    with private_servers(console, routing_key="none") as servers:
        measured = asyncio.run(_measure(servers, rounds))
    lines, figures = [], {}
    for going in Going:
        if gaps := [one.gap for one in measured if one.going is going]:
            spread = report.spread(gaps)
            lines.append([str(going), spread.shown(2), spread.range_shown(2), str(len(gaps))])
            figures[going.name.lower()] = {**asdict(spread), "rounds": len(gaps)}
    title = "Until all partitions of a member flow again, s: medians"
    report.print_table(console, title, ["", "gap", "range", "rounds"], lines)
    report.print_files(console, report.write_json("pool", figures))
    return 0


async def _measure(servers: Servers, rounds: Sequence[Going]) -> list[Gap]:
    database = DatabaseSettings(url=SecretStr(servers.database_url))
    broker = BrokerSettings(url=SecretStr(servers.broker_url))
    measured = []
    async with standing(database, broker, servers.folder, nodes=["relay"], members=["member-0"]) as stand:
        stop = asyncio.Event()
        writing = asyncio.create_task(stand.write_on(RATE, stop))
        for number, going in enumerate(rounds, 1):
            measured.append(one := await _round(stand, going, f"member-{number}"))
            console.print(f"round {number}/{len(rounds)}  {going}: {one.gap:.2f} s")
        stop.set()
        await writing
        try:
            await stand.judge()
        except (AssertionError, TimeoutError) as error:
            raise BenchmarkError(str(error)) from error
    return measured


async def _round(stand: Stand, going: Going, name: str) -> Gap:
    (other,) = stand.members
    stand.start_member(name)
    await stand.shared(other, name)
    await asyncio.sleep(BEFORE)
    async with stand.connected() as connection:
        (since,) = await (await connection.execute(NOW)).fetchone() or ()
        cursor = await connection.execute(HELD, {"member": name, "now": since})
        partitions = [partition for (partition,) in await cursor.fetchall()]
        process = stand.members.pop(name)
        process.tell(STRIKES[going])
        values = {"member": name, "since": since, "partitions": partitions}
        async with asyncio.timeout(WITHIN):
            while True:
                count, gap = await (await connection.execute(FLOWS_AGAIN, values)).fetchone() or (0, 0.0)
                if count == len(partitions):
                    break
                await asyncio.sleep(0.05)
    process.stop(signal.SIGKILL)
    return Gap(going, gap)


if __name__ == "__main__":
    main(app)
