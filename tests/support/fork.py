"""What a fork of this process does, and what its parent's event loop has to do with it."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import print_exc

from relay.errors import ForkedError

REFUSED, FAILED = 7, 8  # exit codes
LONGEST = 30  # seconds, which end the fork


def code_of_fork(work: Callable[[], object]) -> int:
    """Do it in a fork, and return the fork's exit code: 0, REFUSED by ForkedError, or FAILED."""
    if (pid := os.fork()) == 0:
        signal.alarm(LONGEST)
        code = FAILED
        try:
            work()
            code = 0
        except ForkedError:
            code = REFUSED
        except BaseException:
            print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)  # without the tests' clean-up, which is the parent's
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def watched_by(loop: asyncio.AbstractEventLoop) -> set[str]:
    """Return the files that the kernel watches for a loop, each as its epoll describes it."""
    epoll = loop._selector.fileno()  # type: ignore[attr-defined]
    return {line for line in Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines() if line.startswith("tfd:")}
