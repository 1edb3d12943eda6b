"""How long a partition waits when its member goes: `python -m bench.pool`. See docs/benchmarks.md.

Two members of a pool with the default time-outs take what a relay sends; one of them is killed, frozen or stopped in
order. Measured is the time until the last of its partitions flows again, in the hands of the other one.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from enum import StrEnum
from itertools import count

import structlog
from pydantic import SecretStr

from bench.frame.error import BenchmarkError
from bench.frame.run import Bench, Column, CountOrNone, ResultTable, Run, main
from bench.frame.servers import Servers, private_servers
from relay.config.settings import BrokerSettings, DatabaseSettings
from tests.consume.pool.processes import PoolProcesses, pool_processes

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


class MemberChange(StrEnum):
    """What becomes of one of two members."""

    KILLED = "member killed"
    FROZEN = "member frozen"
    STOPPED = "member stopped in order"


STRIKES = {
    MemberChange.KILLED: signal.SIGKILL,
    MemberChange.FROZEN: signal.SIGSTOP,
    MemberChange.STOPPED: signal.SIGTERM,
}


def measure(*, killed: CountOrNone = 10, frozen: CountOrNone = 3, stopped: CountOrNone = 5, run: Bench) -> None:
    """Measure how soon a pool's partitions flow again. Exit code 1 when a message was lost, doubled or out of order.

    Parameters
    ----------
    killed, frozen, stopped
        How often one of two members is killed, frozen or stopped in order; 0 leaves it out.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # of the declarations
    gaps = run.table("Until all partitions of a member flow again, s", Column("gap", "gap", 2))
    with private_servers(run, routing_key="none") as servers:
        asyncio.run(_measure(servers, dict(zip(MemberChange, (killed, frozen, stopped), strict=True)), run, gaps))


async def _measure(servers: Servers, rounds: Mapping[MemberChange, int], run: Run, gaps: ResultTable) -> None:
    database = DatabaseSettings(url=SecretStr(servers.database_url))
    broker = BrokerSettings(url=SecretStr(servers.broker_url))
    names = map("member-{}".format, count(1))
    async with pool_processes(database, broker, servers.folder, nodes=["relay"], members=["member-0"]) as processes:
        stop = asyncio.Event()
        writing = asyncio.create_task(processes.write_on(RATE, stop))
        for going, times in rounds.items():
            for number, _ in run.turns([going], times):
                gaps.add(going, {"gap": await _gap(processes, going, next(names))}, number)
        stop.set()
        await writing
        try:
            await processes.judge()
        except (AssertionError, TimeoutError) as error:
            raise BenchmarkError(str(error)) from error


async def _gap(processes: PoolProcesses, going: MemberChange, name: str) -> float:
    """Return the seconds from the strike until the last of the member's partitions flows again."""
    (other,) = processes.members
    processes.start_member(name)
    await processes.shared(other, name)
    await asyncio.sleep(BEFORE)
    async with processes.connected() as connection:
        (since,) = await (await connection.execute(NOW)).fetchone() or ()
        cursor = await connection.execute(HELD, {"member": name, "now": since})
        partitions = [partition for (partition,) in await cursor.fetchall()]
        process = processes.members.pop(name)
        process.tell(STRIKES[going])
        values = {"member": name, "since": since, "partitions": partitions}
        async with asyncio.timeout(WITHIN):
            while True:
                flowing, gap = await (await connection.execute(FLOWS_AGAIN, values)).fetchone() or (0, 0.0)
                if flowing == len(partitions):
                    break
                await asyncio.sleep(0.05)
    process.stop(signal.SIGKILL)
    return float(gap)


if __name__ == "__main__":
    main(measure)
