"""The benchmark of pauses measures what it says, on servers that really fail."""

from pathlib import Path

import pytest

from bench.frame.error import BenchmarkError
from bench.frame.run import Figures
from bench.pauses import LoadOptions, count_lost, kill_leader, kill_primary, restart_broker
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.faults.checker import Finding, Findings, Invariant, Verdict
from tests.support.cluster import Cluster, why_not
from tests.support.pair import Pair

VALID = dict.fromkeys(Invariant, Finding(Verdict.VALID))


@pytest.fixture
def options(tmp_path: Path) -> LoadOptions:
    return LoadOptions(tmp_path, rate=300, seconds=1)


@pytest.mark.drills
@pytest.mark.timeout(300)
def test_the_node_of_a_leader_is_killed_twice(postgres: PostgresServer, options: LoadOptions) -> None:
    """When the node of a queue's leader is killed, the benchmark measures a pause and no message is lost."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no cluster: {reason}")
    with Cluster() as cluster:
        measured = [kill_leader(options, postgres, cluster, number) for number in (1, 2)]

    assert_paused(measured)


@pytest.mark.drills
@pytest.mark.timeout(300)
def test_a_broker_is_restarted_twice(postgres: PostgresServer, options: LoadOptions) -> None:
    """When the only broker restarts, the benchmark measures a pause and no message is lost."""
    with RabbitServer(schedulers=1) as broker:
        measured = [restart_broker(options, postgres, broker) for _ in range(2)]

    assert_paused(measured)


@pytest.mark.drills
@pytest.mark.timeout(300)
def test_a_primary_is_killed_twice(rabbitmq: RabbitServer, options: LoadOptions) -> None:
    """When the primary of a synchronous pair is killed, the benchmark measures a pause and no message is lost."""
    with Pair() as pair:
        measured = [kill_primary(options, pair, rabbitmq) for _ in range(2)]

    assert_paused(measured)


def test_what_the_checker_finds_lost_is_counted() -> None:
    findings = found(Invariant.NOTHING_LOST, Finding(Verdict.INVALID, ["one", "another"]))

    assert count_lost(findings) == 2


@pytest.mark.parametrize(
    ("invariant", "verdict"),
    [(Invariant.NOTHING_LOST, Verdict.UNKNOWN), (Invariant.IN_ORDER, Verdict.INVALID)],
)
def test_a_run_that_is_worth_nothing_ends_the_benchmark(invariant: Invariant, verdict: Verdict) -> None:
    with pytest.raises(BenchmarkError, match=str(invariant)):
        count_lost(found(invariant, Finding(verdict, ["words"])))


def found(invariant: Invariant, finding: Finding) -> Findings:
    return {**VALID, invariant: finding}


def assert_paused(measured: list[Figures]) -> None:
    assert [one["lost"] for one in measured] == [0] * len(measured)
    assert all(one[name] > 0 for one in measured for name in ("pause", "before", "own"))
