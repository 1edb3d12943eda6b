"""`outbox-spark`, or `python -m outbox_spark.jobs`: run a job, or help to submit one to a cluster."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

JOBS = {
    "archive": "write closed days of sent rows to Parquet",
    "replay": "send archived days again, through the outbox",
    "reconcile": "compare business rows, their events and what a consumer applied",
}
FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the first argument names, and return its exit code. Else print the folder, or write the zip."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in JOBS:
        code: int = import_module(f"outbox_spark.jobs.{given[0]}").main(given[1:])
        return code
    parser = argparse.ArgumentParser(
        prog="outbox-spark",
        usage=f"outbox-spark [{' | '.join(JOBS)}] [options]\n       outbox-spark [--zip FILE]",
        description="\n".join(f"{name:10} {what}" for name, what in JOBS.items()),
        epilog="`outbox-spark archive --help` has the options of a job. Without a job: print the folder of their "
        'files, for spark-submit "$(outbox-spark)/archive.py".',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--zip", type=Path, metavar="FILE", help="write this package there, for --py-files")
    target = parser.parse_args(given).zip
    if target is None:
        print(FOLDER)
        return 0
    try:
        with ZipFile(target, "w", ZIP_DEFLATED) as written:
            for file in sorted(PACKAGE.rglob("*.py")):
                written.write(file, file.relative_to(PACKAGE.parent))
    except OSError as error:
        parser.error(f"{target} cannot be written: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
