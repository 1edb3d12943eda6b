"""Everything at once, from a seed: `python -m tests.chaos --seconds 60 --seed 7`, or `make chaos SECONDS=60 SEED=7`.

Writers commit, roll back and commit late, three relays carry, and whatever one machine can break is broken, several
things at a time. Then everything heals, and the checker (tests/faults/checker.py) judges what became of each message.
"""

import asyncio
import logging
import secrets
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from relay.testing.servers.folders import temporary_folder
from tests.chaos import summary
from tests.chaos.fleet import private_servers
from tests.chaos.remains import last_words
from tests.chaos.run import SHORTEST, run

Seconds = Annotated[float, Parameter(validator=validators.Number(gte=SHORTEST))]

app = App(name="python -m tests.chaos", help="Break everything at once, and check.", version_flags=[])


@app.default
def chaos(*, seconds: Seconds = 60.0, seed: int | None = None, logs: Path | None = None) -> int:
    """Print the plan as it is carried out, and a summary. Exit code 1 when a verdict is not valid.

    Parameters
    ----------
    seconds
        How long is written; the faults leave out the beginning and the end of it.
    seed
        Decides the faults, when they come and how long they last; drawn and told when it is not given.
    logs
        An existing folder for the relays' logs, which are not kept otherwise.
    """
    logging.disable(logging.CRITICAL)  # the AMQP library logs every failed connection
    seed = secrets.randbits(16) if seed is None else seed
    print(f"seed {seed}", flush=True)
    with nullcontext(logs) if logs else temporary_folder() as folder, private_servers() as servers:
        begun = time.monotonic()

        def say(words: str) -> None:
            print(f"{time.monotonic() - begun:6.1f}  {words}", flush=True)

        outcome = asyncio.run(run(servers, seed, seconds, folder, say))
        passed = summary.is_passed(outcome)
        if not passed:  # before the summary, so that the end of a cut log tells why
            print(*last_words(folder), *outcome.remains, sep="\n")
        print(*summary.lines(outcome), sep="\n")
    if passed:
        return 0
    print(f"seed {seed} fails; again: make chaos SECONDS={seconds:g} SEED={seed}")
    return 1


if __name__ == "__main__":
    sys.exit(app())
