"""`python -m outbox_spark.jobs`: print the folder of the jobs, or make the zip that `--py-files` takes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

PACKAGE = Path(__file__).parent
# Next to the package in a checkout, and within `relay` where both are installed.
FOLDERS = (PACKAGE.parent / "jobs", PACKAGE.parent / "relay" / "spark" / "jobs")


def main(arguments: Sequence[str]) -> None:
    """Print the folder, or write the zip."""
    parser = argparse.ArgumentParser(
        prog="python -m outbox_spark.jobs",
        description='Print the folder of the jobs, for spark-submit "$(python -m outbox_spark.jobs)/archive.py".',
    )
    parser.add_argument("--zip", type=Path, metavar="FILE", help="write this package there instead, for --py-files")
    target = parser.parse_args(arguments).zip
    if target is None:
        print(next(folder for folder in FOLDERS if folder.is_dir()))
        return
    try:
        with ZipFile(target, "w", ZIP_DEFLATED) as written:
            for file in sorted(PACKAGE.rglob("*.py")):
                written.write(file, file.relative_to(PACKAGE.parent))
    except OSError as error:
        parser.error(f"{target} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
