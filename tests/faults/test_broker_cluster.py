"""A cluster of brokers under load: a leader dies, links are cut, a node freezes, all are restarted in turn.

Each drill breaks one thing while writers go on, heals it, and sees by the queue itself that nothing was lost or
reordered, that only what was in flight came twice, and that no attempt was burnt.
"""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.failover import failover
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]


async def test_the_leader_s_node_is_killed(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with failover(cluster, database_url, tmp_path) as scene:
        await asyncio.to_thread(scene.leader.stop, signal.SIGKILL)

        await scene.load.comes_on(60)
        await scene.finish()


@pytest.mark.parametrize("through", ["leader", "follower"])
async def test_a_leader_s_links_are_cut(cluster: Cluster, database_url: str, tmp_path: Path, through: str) -> None:
    async with failover(cluster, database_url, tmp_path, through=through) as scene:
        scene.leader.cut()

        await scene.load.comes_on(60)
        await scene.finish()


async def test_a_follower_is_cut_off(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with failover(cluster, database_url, tmp_path) as scene:
        scene.followers[0].cut()

        await scene.load.comes_on(60)
        assert scene.losses == []
        await scene.finish()


async def test_a_leader_no_longer_hears_the_other_nodes(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with failover(cluster, database_url, tmp_path) as scene:
        scene.leader.cut_peers()

        await scene.load.comes_on(60)
        await scene.finish()


async def test_a_leader_freezes_and_wakes(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with failover(cluster, database_url, tmp_path) as scene:
        scene.leader.freeze()

        await scene.load.comes_on(60)
        await scene.finish()


async def test_all_nodes_are_restarted_in_turn(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with failover(cluster, database_url, tmp_path) as scene:
        for node in cluster.nodes:
            await node.restart(signal.SIGTERM)
            await scene.load.comes_on(60)

        await scene.finish()
