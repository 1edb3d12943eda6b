"""Processes that a test starts: each ends when the test says so, and at the latest with the run of the tests."""

import atexit
import os
import pwd
import random
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SETPRIV = "setpriv"  # of util-linux
POLL = 0.02  # seconds between two looks at something that is starting or ending
PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes
KEPT_CLAIMS = 100  # more ports than are given out while a server starts
CLAIMS: deque[socket.socket] = deque()  # to ports, of this process


@atexit.register
def _close_claims() -> None:
    while CLAIMS:
        CLAIMS.popleft().close()


class ServerError(Exception):
    """A private server did not start, or a command failed; the message names it and shows its output."""


def free_port() -> int:
    """Return a free loopback port. No other caller gets the same port before a server listens on it.

    It is below 32768: the kernel gives the ports above to outgoing connections, which could take it first.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind(f"\0outbox-relay port {port}")  # an abstract name: no file, and gone with the process
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        CLAIMS.append(claim)
        if len(CLAIMS) > KEPT_CLAIMS:
            CLAIMS.popleft().close()
        return port


def wait_for(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Return once `condition()` holds.

    Raises:
        TimeoutError: it did not hold within `seconds`; the message names `what`.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL)


def is_listening(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a process accepts connections there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


class Process:
    """A program in its own session, so that Ctrl-C reaches the test run first, which then ends the program.

    The kernel kills the program when the thread that started it ends, so start it from the main thread.
    `user`: the user to run as, if the tests run as root.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        user: str | None = None,
        name: str | None = None,
        death_signal: str = "KILL",
    ) -> None:
        self.name = name or Path(command[0]).name
        self.returncode: int | None = None
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the caller names the program
                # setpriv replaces itself by the program, so the process id is the program's. A Python function
                # run between fork and exec would do the same, but is refused with threads from Python 3.12 on.
                [SETPRIV, f"--pdeathsig={death_signal}", *as_user(user), "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        self.returncode = self._process.poll()
        return self.returncode is None

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return once `condition()` holds. If it does not, end the process and show the end of its log.

        Raises:
            ServerError: the process ended by itself, or the condition did not hold in time.
        """
        try:
            wait_for(lambda: not self.is_running() or condition(), f"{self.name} starts", seconds)
        except TimeoutError as error:
            self.stop(signal.SIGKILL)
            raise ServerError(f"{error}\n{self.log_end()}") from error
        except BaseException:  # Ctrl-C too: a half-started server has no other owner yet
            self.stop(signal.SIGKILL)
            raise
        if not self.is_running():
            self.stop(signal.SIGKILL)  # it may have left children
            raise ServerError(f"{self.name} ended at once with code {self.returncode}\n{self.log_end()}")

    def tell(self, how: signal.Signals) -> None:
        """Send a signal to the process, without waiting."""
        self._process.send_signal(how)

    def stop(self, how: signal.Signals, seconds: float = 20) -> None:
        """End the process with this signal, and with SIGKILL after `seconds`. Returns when the process has ended.

        Processes that it has left behind in its session are killed, too.
        """
        if self.is_running():
            self._process.send_signal(how)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        for pid in _session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.returncode = self._process.wait()

    def log_end(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def run(
    command: Sequence[str | Path],
    *,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> str:
    """Run a short command to its end and return its output.

    Raises:
        ServerError: the command failed; the message holds its output.
    """
    prefix = [SETPRIV, *as_user(user), "--"] if as_user(user) else []
    done = subprocess.run(  # noqa: S603 - the caller names the program
        [*prefix, *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        input=stdin,
        cwd="/",
        start_new_session=True,
    )
    if done.returncode:
        words = (done.stderr + done.stdout).strip()
        raise ServerError(f"{Path(command[0]).name} failed with code {done.returncode}: {words}")
    return done.stdout


def as_user(user: str | None) -> list[str]:
    """Return the arguments that run a program as `user` with setpriv; none unless root runs the tests."""
    if user is None or os.geteuid() != 0:
        return []
    return [f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def _session(leader: int) -> list[int]:
    """Return the living processes of a session. Process groups would miss Spark's workers, which make their own."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # The name in parentheses may hold blanks; behind it: state, parent, process group, session.
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                members.append(int(stat.parent.name))
    return members
