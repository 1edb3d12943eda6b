"""What the benchmark commands have in common on the command line."""

import sys
from typing import Annotated, NoReturn

from cyclopts import App, Parameter, validators

from bench.frame.error import BenchmarkError
from tests.support.process import ServerError

Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
CountOrNone = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Positive = Annotated[float, Parameter(validator=validators.Number(gt=0))]
PositiveOrNone = Annotated[float, Parameter(validator=validators.Number(gte=0))]


def main(app: App) -> NoReturn:
    """Run a command: exit with its code; with 1 and one line when it cannot measure, with 130 after Ctrl-C."""
    try:
        sys.exit(app())
    except (BenchmarkError, ServerError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
