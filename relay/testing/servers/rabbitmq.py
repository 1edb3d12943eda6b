"""A private RabbitMQ node: own folder, ports, cookie and epmd, on loopback, ended with us."""

import os
import secrets
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from relay.testing.servers.process import Process, ServerError, free_port, is_listening, run
from relay.testing.servers.server import PrivateServer

# Not /usr/sbin: the wrappers of the packages there change to the user `rabbitmq` and refuse everybody but root.
PACKAGED = Path("/usr/lib/rabbitmq/bin")
USER = "relay"

# Erlang's schedulers spin while idle, at the cost of everything else on the machine.
NO_BUSY_WAIT = " ".join(f"{each} none" for each in ("+sbwt", "+sbwtdcpu", "+sbwtdio"))


class RabbitServer(PrivateServer):
    """One node; `with RabbitServer() as node:` starts and stops it.

    Args:
        folder: where its data is kept for the next one; a temporary one unless given.
        configuration: further keys of rabbitmq.conf.
        schedulers: Erlang's threads; one for each core unless given.
        plugins: those to enable.
        durable: its data is on the disk, as in production; else in memory.
    Raises:
        ServerError: it is not installed, or did not start.
    """

    IN_ORDER = signal.SIGTERM

    address = "127.0.0.1"
    _inside: Sequence[str] = ()  # what comes before a command to run it in the node's network

    def __init__(
        self,
        *,
        folder: Path | None = None,
        configuration: Mapping[str, str] | None = None,
        schedulers: int | None = None,
        plugins: Sequence[str] = (),
        durable: bool = False,
    ) -> None:
        super().__init__(folder, durable=durable)
        self._plugins = plugins
        self._configuration = configuration or {}
        self._erlang_arguments = NO_BUSY_WAIT + (f" +S {schedulers}:{schedulers}" if schedulers else "")
        self._epmd: Process | None = None

    def url(self, vhost: str = "/") -> str:
        """Return the AMQP URL of a virtual host."""
        return f"amqp://{USER}:{self._password}@{self.address}:{self.port}/{vhost.replace('/', '%2F')}"

    def add_vhost(self, name: str) -> str:
        """Make a virtual host that our user may do everything in, and give its URL."""
        self.call(
            f'rabbit_vhost:add(<<"{name}">>, <<"tests">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"{USER}">>, <<"{name}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )
        return self.url(name)

    def delete_vhost(self, name: str) -> None:
        """Remove it with its queues, closing the connections that are still in it."""
        self.call(f'rabbit_vhost:delete(<<"{name}">>, <<"tests">>).')

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl, which takes half a second, and give what it printed.

        Raises:
            ServerError: it failed; the message holds its words.
        """
        command, environment = self.control()
        return run([*command, *arguments], environment=environment)

    def control(self) -> tuple[list[str], dict[str, str]]:
        """Return the command that is `rabbitmqctl` for this node, and the environment that it needs."""
        return [*self._inside, str(self._programs / "rabbitmqctl"), "-q", "-n", self._name], self._environment

    def call(self, expressions: str) -> str:
        """Evaluate Erlang expressions on the node, which takes a few milliseconds, and give the result as text.

        Raises:
            ServerError: they failed.
        """
        answer = self._erl_call(f"{expressions}\n")
        if not answer.startswith("{ok, "):
            raise ServerError(f"{expressions} failed on the node: {answer}")
        return answer.removeprefix("{ok, ").removesuffix("}")

    def start(self) -> None:
        self.launch()
        self.await_up()

    def launch(self) -> None:
        """Start it and do not wait: the nodes of a cluster wait for each other."""
        self._start_epmd()
        self._process = Process(
            [*self._inside, self._programs / "rabbitmq-server"],
            log=self._folder / "rabbitmq.log",
            environment=self._environment,
            folder=self._folder,
        )

    def await_up(self) -> None:
        self.process.wait_until(lambda: is_listening(self.port, self.address), 90)
        self.call("rabbit:await_startup().")

    def _erl_call(self, expressions: str) -> str:
        cookie = (self._folder / "home" / ".erlang.cookie").read_text()
        command = ["erl_call", "-address", f"{self.address}:{self._dist_port}", "-c", cookie, "-timeout", "30", "-e"]
        return run([*self._inside, *command], environment=self._environment, stdin=expressions)

    def _prepare(self, folder: Path) -> None:
        if (programs := installed()) is None:
            raise ServerError("RabbitMQ is not installed: install the package rabbitmq-server")
        self._programs = programs
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._password = _secret(folder / "password")
        _secret(home / ".erlang.cookie")
        self._choose_place()
        self._environment = self._variables(folder)
        (folder / "enabled_plugins").write_text(f"[{', '.join(self._plugins)}].\n")
        lines = {
            "default_user": USER,
            "default_pass": self._password,
            "loopback_users": "none",
            "disk_free_limit.absolute": "50MB",
            **self._configuration,
        }
        configuration = folder / "rabbitmq.conf"
        configuration.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        configuration.chmod(0o600)

    def _choose_place(self) -> None:
        self.port, self._dist_port, self._epmd_port = free_port(), free_port(), free_port()
        # The name stays: a node's data belongs to its name. Two nodes of one name meet nowhere, as each has its epmd.
        self._name = "relay@localhost"

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the node's environment."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_NODE_IP_ADDRESS": self.address,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # what the machine configures is not for this node
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"{self._erlang_arguments} -kernel inet_dist_use_interface {{{self.address.replace('.', ',')}}}"
            ),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": self.address,
            # The script then becomes the node instead of staying next to it: one process to end.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _start_epmd(self) -> None:
        """Start the name server ourselves: one started by Erlang detaches and outlives us."""
        if self._epmd is None:
            self._epmd = Process(
                [*self._inside, "epmd", "-port", str(self._epmd_port), "-address", self.address],
                log=self._folder / "epmd.log",
                environment=self._environment,
            )
            self._stack.callback(self._epmd.stop, signal.SIGTERM)
            self._epmd.wait_until(lambda: is_listening(self._epmd_port, self.address), 10)


def installed() -> Path | None:
    """Return the folder of RabbitMQ's programs: that of the packages, else that of PATH."""
    if (PACKAGED / "rabbitmq-server").exists():
        return PACKAGED
    program = shutil.which("rabbitmq-server")
    return None if program is None else Path(program).resolve().parent


def _secret(file: Path) -> str:
    """Return the secret kept in this file; a new one when the file is missing."""
    if not file.exists():
        file.touch(0o600)
        file.write_text(secrets.token_hex(12))
        file.chmod(0o400)  # Erlang refuses a cookie that others may read
    return file.read_text()
