"""Podman with separate storage and settings, which neither sees nor changes the machine's containers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.process import ServerError
from tests.cli.command import Result

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/python:3.13-slim-trixie"
NEWEST = "localhost/python:3.14-slim-sid"  # of Debian unstable
PROGRAMS = ("podman", "runc", "debootstrap")
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")

# As root inside of another container and without systemd. Podman's own choices do not work there: crun refuses hybrid
# cgroups, and the default limits are above what we may ask for.
SETTINGS = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:8192"]
"""
STORAGE = """
[storage]
driver = "{driver}"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""


class Podman:
    """Podman and its images in one folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "containers.conf").write_text(SETTINGS)
        self.folder = folder
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "TMPDIR": str(folder),
        }
        for driver in ("overlay", "vfs"):  # vfs works everywhere, and copies an image for each container
            (folder / "storage.conf").write_text(STORAGE.format(driver=driver, folder=folder))
            if self("info").code == 0:
                break

    def __call__(self, *arguments: str, seconds: float = 60) -> Result:
        """Run `podman ...` to its end, and return its result."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Result(done.returncode, done.stdout, _own_words(done.stderr))

    @property
    def command(self) -> list[str]:
        """The command before its arguments, for a caller without this environment."""
        own = [f"{name}={value}" for name, value in self.environment.items() if os.environ.get(name) != value]
        return ["env", *own, "podman"]

    def do(self, *arguments: str, seconds: float = 60) -> str:
        """Run `podman ...`, which must succeed, and return its output.

        Raises:
            ServerError: it failed; the message holds its output.
        """
        done = self(*arguments, seconds=seconds)
        if done.code:
            raise ServerError(f"podman {arguments[0]} failed with code {done.code}: {done.err}")
        return done.out.strip()

    def make_base(self, name: str = BASE) -> None:
        """Make a base image, because no image can be pulled: a Debian with Python, as small as the slim images.

        It trusts the authorities that this machine trusts, as a private base image behind a proxy does.
        """
        tree = self.folder / "base"
        include = "--include=ca-certificates,python3,python3-venv"
        release = name.rpartition("-")[2]
        self.run(["debootstrap", "--variant=minbase", include, release, tree, *_mirror()])
        for left in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
            shutil.rmtree(tree / left)
        # Like the images of Python, it has no bytecode.
        for cache in list((tree / "usr/lib").rglob("__pycache__")):
            shutil.rmtree(cache)
        if (trusted := Path("/") / CERTIFICATES).exists():
            shutil.copy(trusted, tree / CERTIFICATES)
        archive = self.folder / "base.tar"
        self.run(["tar", "--create", "--file", archive, "--directory", tree, "."])
        shutil.rmtree(tree)
        self.do("import", str(archive), name, seconds=300)
        archive.unlink()

    def build(self, target: str) -> None:
        """Build an image of the project with the command of `make image`."""
        # chroot: no second network inside; without layers, which are of no use in a storage that ends with the run.
        options = ["--isolation=chroot", "--layers=false", f"--build-arg=BASE={BASE}"]
        if (configuration := self.pip_configuration()) is not None:
            options.append(f"--secret=id=pip.conf,src={configuration}")
        without_docker = {**self.environment, "DOCKER_HOST": "unix:///nowhere"}
        self.run([ROOT / "config/build-image", target, *options], environment=without_docker)

    def run(self, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> None:
        """Run a longer command, which must succeed.

        Raises:
            ServerError: it failed; the message holds the end of its output.
        """
        done = subprocess.run(
            [*map(str, command)],
            env=environment or self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            end = "\n".join(done.stdout.splitlines()[-30:])
            raise ServerError(f"{Path(command[0]).name} failed with code {done.returncode}\n{end}")

    def size(self, image: str) -> int:
        """Return the size of an image in bytes, including its base."""
        return int(self.do("image", "inspect", "--format", "{{.Size}}", image))

    def pip_configuration(self) -> Path | None:
        """Return a file that names the package index of this machine's pip; None if it is the default."""
        asked = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        lines = []
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            option, words = name.rpartition(".")[2], value.strip("'").split()
            reachable = [word for word in words if not word.startswith("file:")]
            if option in ("index-url", "extra-index-url", "trusted-host", "proxy") and reachable:
                lines.append(f"{option} = {' '.join(reachable)}\n")
        if not lines:
            return None
        file = self.folder / "pip.conf"
        file.write_text("[global]\n" + "".join(dict.fromkeys(lines)))
        return file


def missing() -> list[str]:
    """Return the needed programs that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def private_podman() -> Iterator[Podman]:
    """Yield a podman without images; its containers and files are removed at the end."""
    with temporary_folder() as folder:
        podman = Podman(folder)
        try:
            yield podman
        finally:
            podman.do("rm", "--all", "--force", "--time", "0", seconds=120)
            podman.do("network", "prune", "--force")


def _mirror() -> list[str]:
    """Return the Debian archive that this machine's apt uses; without one debootstrap takes its own."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return [each for each in found if not each.rstrip("/").endswith("-security")][:1]


def _own_words(errors: str) -> str:
    """Return the output without the warning about a missing systemd: the tests run the health checks themselves."""
    return "".join(line for line in errors.splitlines(keepends=True) if "unable to get systemd connection" not in line)
