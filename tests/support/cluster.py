"""Three RabbitMQ nodes in one cluster. Each has its own network namespace, so that a drill can cut real links.

    with Cluster() as cluster:
        cluster.urls(vhost)     # of the three nodes, for RELAY_BROKER_URL
        cluster.nodes[0].cut()  # no packet to or from it, and no peer is told
        await cluster.heal()    # everything as at the start

The namespaces have no name. Each lives as long as an idle process of ours, and its links end with it.
A bridge in a fourth namespace joins them. One link leads from the bridge to this machine's network, where clients are.
"""

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.process import Process, ServerError, run, wait_for
from relay.testing.servers.rabbitmq import RabbitServer, installed
from tests.support.eventually import eventually

CONFIGURATION = Path("config/rabbitmq/rabbitmq.conf")
AMQP_PORT, DIST_PORT, EPMD_PORT = 5672, 25672, 4369
BRIDGE = "bridge"
PROGRAMS = ("ip", "unshare", "nsenter", "iptables")
STARTED_WITHIN = 90.0  # seconds
# RabbitMQ 4.3 has Khepri alone, and no partitions: a node that has no majority changes nothing.
HAS_MNESIA = "erlang:function_exported(rabbit_node_monitor, partitions, 0)"
RUNNING = f"case {HAS_MNESIA} of true -> rabbit_mnesia:cluster_nodes(running); _ -> rabbit_nodes:list_running() end"
PARTITIONS = f"case {HAS_MNESIA} of true -> rabbit_node_monitor:partitions(); _ -> [] end"
BACK_WITHIN = 20.0  # seconds; a healed node that is not back by then is killed and started, as an operator would


class Node(RabbitServer):
    """One of the three nodes, with its faults."""

    def __init__(self, cluster: "Cluster", number: int, folder: Path) -> None:
        super().__init__(folder=folder, schedulers=1, configuration=cluster.configuration)
        self.number = number
        self._cluster = cluster
        self.address = cluster.address(number)
        self._inside = inside(cluster.namespaces[number])
        self.is_frozen = False
        self.is_faulty = False  # something was done to it since the last `heal`

    def cut(self) -> None:
        """Drop every packet to and from the node; no peer is told."""
        self.is_faulty = True
        self._cluster.ip("link", "set", f"node{self.number}", "down")

    def cut_peers(self) -> None:
        """Drop the packets between this node and the other nodes; clients still reach it."""
        self.is_faulty = True
        for other in self._cluster.nodes:
            if other is not self:
                run([*self._inside, "iptables", "--append", "INPUT", "--source", other.address, "--jump", "DROP"])
                run([*self._inside, "iptables", "--append", "OUTPUT", "--destination", other.address, "--jump", "DROP"])

    def lose(self, share: float) -> None:
        """Drop this share of the incoming packets."""
        rule = ["--match", "statistic", "--mode", "random", "--probability", str(share), "--jump", "DROP"]
        run([*self._inside, "iptables", "--append", "INPUT", *rule])

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_frozen = self.is_faulty = True

    def thaw(self) -> None:
        """Resume the frozen node. Whatever the other nodes did meanwhile stays."""
        os.kill(self.pid, signal.SIGCONT)
        self.is_frozen = False

    def heal(self) -> None:
        """Undo `cut`, `cut_peers`, `lose` and `freeze`, and start the node if it has ended."""
        self._cluster.ip("link", "set", f"node{self.number}", "up")
        run([*self._inside, "iptables", "--flush"])
        if self.is_frozen and self.is_running():
            self.thaw()
        self.is_frozen = self.is_faulty = False
        if not self.is_running():
            self.launch()

    async def restart(self, how: signal.Signals) -> None:
        """End the node and start it again. Returns when it is back in the cluster."""
        await asyncio.to_thread(self.stop, how)
        self.launch()
        await eventually(lambda: asyncio.to_thread(self.is_back), f"node {self.number} is back", 60)

    def is_back(self) -> bool:
        return self.sees() > 1

    def sees(self) -> int:
        """Return how many nodes it sees in the cluster; 0 if it does not answer, or is partitioned from one."""
        try:
            answer = self.call(f"{{length({RUNNING}), {PARTITIONS}}}.")
        except ServerError:
            return 0
        seen, _, partitions = answer.strip("{}").partition(", ")
        return int(seen) if partitions == "[]" else 0

    def has_khepri(self) -> bool:
        """Whether the list of queues is in Khepri: always from RabbitMQ 4.3 on, before that where it is enabled."""
        enabled = "erlang:function_exported(rabbit_khepri, is_enabled, 0) andalso rabbit_khepri:is_enabled()."
        return self.call(enabled) == "true"

    def is_parted(self) -> bool:
        """Whether it works without the other nodes, with its own list of queues. Only this node knows."""
        return self.call(f"{{rabbit:is_running(), ({PARTITIONS}) =/= []}}.") == "{true, true}"

    def has_vhost(self, name: str) -> bool:
        """Return whether clients of this node can open a virtual host."""
        return self.call(f'rabbit_vhost_sup_sup:is_vhost_alive(<<"{name}">>).') == "true"

    def standing(self, vhost: str) -> str:
        """Return how it does, in words."""
        try:
            return f"sees {self.sees()}, and has the virtual host: {self.has_vhost(vhost)}"
        except ServerError as error:
            return f"{'runs' if self.is_running() else 'has ended'}, and does not answer: {error}"

    def leader_of(self, queue: str, vhost: str) -> str:
        """Return the name of the node that leads a quorum queue."""
        name = f'rabbit_misc:r(<<"{vhost}">>, queue, <<"{queue}">>)'
        return self.call(
            f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), {{_, Node}} = amqqueue:get_pid(Q),"
            " {ok, _, {_, Leader}} = ra:members({element(1, amqqueue:get_pid(Q)), Node}), Leader."
        ).strip("'")

    def open(self, cookie: str, password: str) -> None:
        """Launch the node; the nodes of a cluster share their secrets."""
        assert self._given_folder is not None
        home = self._given_folder / "home"
        home.mkdir(parents=True)
        for file, secret in ((home / ".erlang.cookie", cookie), (self._given_folder / "password", password)):
            file.write_text(secret)
            file.chmod(0o400)
        self._prepare(self._given_folder)
        self.launch()

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        self._stack.close()

    def _choose_place(self) -> None:
        self.port, self._dist_port, self._epmd_port = AMQP_PORT, DIST_PORT, EPMD_PORT
        self._name = f"rabbit@{self.address}"

    def _variables(self, folder: Path) -> dict[str, str]:
        variables = super()._variables(folder) | {"RABBITMQ_USE_LONGNAME": "true"}
        # Erlang 25 would part nodes that a third one cannot reach, where RabbitMQ has its own way (pause_minority).
        variables["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] += " -kernel prevent_overlapping_partitions false"
        return variables


class Cluster:
    """Three nodes; `with` starts and ends them. Needs root.

    Attributes:
        nodes: the three, in the order of `url`.
    """

    def __init__(self, size: int = 3) -> None:
        self._size = size
        self._network = f"10.{secrets.randbelow(64) + 64}.{secrets.randbelow(256)}"
        self._link = f"relay{secrets.token_hex(4)}"
        self._stack = ExitStack()
        self.namespaces: list[int] = []  # the processes that keep them; the last one is the bridge's
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        if (reason := why_not()) is not None:
            raise ServerError(reason)
        try:
            folder = self._stack.enter_context(temporary_folder())
            self._make_network(folder)
            self._start_nodes(folder)
        except BaseException:  # Ctrl-C too: nothing is left behind
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def configuration(self) -> dict[str, str]:
        """Return rabbitmq.conf: the settings of production, and how the nodes find each other here."""
        lines = [line.partition("#")[0] for line in CONFIGURATION.read_text().splitlines()]
        pairs = (line.partition("=") for line in lines if line.strip())
        return {
            **{key.strip(): value.strip() for key, _, value in pairs},
            "cluster_formation.peer_discovery_backend": "classic_config",
            **{
                f"cluster_formation.classic_config.nodes.{number + 1}": f"rabbit@{self.address(number)}"
                for number in range(self._size)
            },
            "disk_free_limit.absolute": "50MB",
            "vm_memory_high_watermark.absolute": "512MB",
        }

    def address(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    def urls(self, vhost: str, *, first: Node | None = None) -> str:
        """Return the list of URLs for RELAY_BROKER_URL, which begins with `first`."""
        order = sorted(self.nodes, key=lambda node: node is not first)
        return ",".join(node.url(vhost) for node in order)

    async def add_vhost(self, name: str) -> None:
        """Make a virtual host. Returns when each node has it; those but the first get it a while later."""
        self.nodes[0].add_vhost(name)
        try:
            await eventually(lambda: asyncio.to_thread(self._have_vhost, name), f"each node has vhost {name}", 60)
        except TimeoutError as error:
            for node in self.nodes:
                error.add_note(f"node {node.number} {node.standing(name)}; its log ends:\n{node.process.log_end()}")
            raise

    def leader_of(self, queue: str, vhost: str) -> Node:
        """Return the node that leads a quorum queue."""
        leader = self.nodes[0].leader_of(queue, vhost)
        return next(node for node in self.nodes if leader.endswith(f"@{node.address}"))

    async def heal(self) -> None:
        """Undo every fault. Returns when each node sees all three, without a partition."""
        faulty = [node for node in self.nodes if node.is_faulty or not node.is_running()]
        booting = [node for node in faulty if not node.is_running()]
        for node in self.nodes:
            node.heal()
        try:
            await eventually(self._asks_all, "the cluster is whole", STARTED_WITHIN if booting else BACK_WITHIN)
        except TimeoutError:
            # Links that come and go may part nodes only after they were seen together: then no node is known as faulty.
            for node in faulty or self.nodes:
                await node.restart(signal.SIGKILL)
            await eventually(self._asks_all, "the cluster is whole after a restart", STARTED_WITHIN)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the namespace of the bridge."""
        run([*inside(self.namespaces[-1]), "ip", *arguments])

    def _have_vhost(self, name: str) -> bool:
        return all(node.has_vhost(name) for node in self.nodes)

    async def _asks_all(self) -> bool:
        return await asyncio.to_thread(self._is_whole)

    def _is_whole(self) -> bool:
        return all(node.sees() == self._size for node in self.nodes)

    def _make_network(self, folder: Path) -> None:
        for number in range(self._size + 1):
            self.namespaces.append(self._namespace(folder / f"namespace{number}.log"))
        bridge = str(self.namespaces[-1])
        self.ip("link", "add", BRIDGE, "type", "bridge")
        self.ip("link", "set", BRIDGE, "up")
        for number, namespace in enumerate(self.namespaces[:-1]):
            name = f"node{number}"
            self.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(namespace))
            self.ip("link", "set", name, "master", BRIDGE, "up")
            run([*inside(namespace), "ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0"])
            run([*inside(namespace), "ip", "link", "set", "eth0", "up"])
            run([*inside(namespace), "ip", "link", "set", "lo", "up"])
        run(["ip", "link", "add", self._link, "type", "veth", "peer", "name", "host", "netns", bridge])
        # The kernel would remove it with the bridge's namespace, but when it gets to it.
        self._stack.callback(lambda: run(["ip", "link", "delete", self._link]))
        self.ip("link", "set", "host", "master", BRIDGE, "up")
        run(["ip", "address", "add", f"{self._network}.254/24", "dev", self._link])
        run(["ip", "link", "set", self._link, "up"])

    def _namespace(self, log: Path) -> int:
        keeper = Process(["unshare", "--net", "sleep", "infinity"], log=log)
        self._stack.callback(keeper.stop, signal.SIGKILL)
        ours = os.readlink("/proc/self/ns/net")
        keeper.wait_until(lambda: os.readlink(f"/proc/{keeper.pid}/ns/net") != ours, 10)
        return keeper.pid

    def _start_nodes(self, folder: Path) -> None:
        cookie, password = secrets.token_hex(12), secrets.token_hex(12)
        for number in range(self._size):
            node = Node(self, number, folder / f"node{number}")
            self.nodes.append(node)
            self._stack.callback(node.close)
            node.open(cookie, password)  # each waits for the others
        for node in self.nodes:
            node.await_up()
        wait_for(self._is_whole, "the cluster is formed", 60)


def inside(namespace: int) -> Sequence[str]:
    """Return the arguments that run a command in the network of this process."""
    return ("nsenter", f"--net=/proc/{namespace}/ns/net")


def why_not() -> str | None:
    """Return why this machine cannot run a cluster; None if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if installed() is None:
        return "RabbitMQ is not installed; `tests/support/packages test` installs it"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{missing[0]} is not installed; `tests/support/packages test` installs it" if missing else None
