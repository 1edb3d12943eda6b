"""A certificate authority, made by openssl for one test."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.testing.servers.process import run

EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]


class Certificate(NamedTuple):
    """A certificate and its private key, in PEM files."""

    file: Path
    key: Path


class Authority:
    """Signs certificates; clients trust it by `file`. The test is skipped if openssl is not installed."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._folder = folder
        self.file, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        signs = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        run(["openssl", "req", "-x509", "-nodes", *EC, "-subj", f"/CN={name}", *signs, *self._files(name)])

    def issue(self, *names: str, passphrase: str | None = None) -> Certificate:
        """Return a certificate for these DNS names; the first is its subject. It serves servers and clients.

        The key is encrypted if there is a passphrase.
        """
        name = names[0]
        alternatives = ",".join(f"DNS:{each}" for each in names)
        usage = ["-addext", f"subjectAltName={alternatives}", "-addext", "basicConstraints=critical,CA:FALSE"]
        signed: list[str | Path] = ["-x509", "-CA", self.file, "-CAkey", self._key]
        locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
        file = f"{name}.locked" if passphrase else name
        run(["openssl", "req", *signed, *locked, *EC, "-subj", f"/CN={name}", *usage, *self._files(file)])
        return Certificate(self._folder / f"{file}.crt", self._folder / f"{file}.key")

    def _files(self, name: str) -> list[str | Path]:
        return ["-keyout", self._folder / f"{name}.key", "-out", self._folder / f"{name}.crt"]
