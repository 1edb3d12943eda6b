"""The tests of all parts but Spark, on the newest Python, PostgreSQL and RabbitMQ that Debian has."""

import shutil
from pathlib import Path

import pytest

from tests.container.podman import NEWEST, ROOT, Podman
from tests.support.releases import NEWEST as SERVER
from tests.support.versions import Versions, documented, two_numbers

pytestmark = [pytest.mark.images, pytest.mark.timeout(3000)]

PARTS = (
    "outbox",
    "migrations",
    "engine",
    "doctor",
    "consume",
    "dead_letters",
    "publisher",
    "topology",
    "cli",
    "operate",
    "django_app",
    "testing/test_django.py",
    "examples/test_django_shop.py",
)
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".demo", "build", "dist", "__pycache__", "*.so")
INSIDE = "/src/tests/container/newest"


def test_the_parts_pass_on_them(podman: Podman, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    podman.make_base(NEWEST)
    shutil.copytree(ROOT, tmp_path / "src", ignore=LEFT_OUT)
    shown = [f"--volume={tmp_path / 'src'}:/src"]
    if (configuration := podman.pip_configuration()) is not None:
        shown.append(f"--volume={configuration}:/etc/pip.conf:ro")
    tests = [f"tests/{part}" for part in PARTS]
    options = ["-q", "-p", "no:cacheprovider", "--numprocesses=2", "--dist=loadfile"]

    done = podman("run", "--rm", "--network=host", *shown, NEWEST, INSIDE, *options, *tests, seconds=2900)

    assert done.code == 0, done.out + done.err
    python, rabbitmq, *_, result = done.out.splitlines()
    used = Versions(two_numbers(python.removeprefix("Python ")), str(SERVER), two_numbers(rabbitmq))
    with capsys.disabled():
        print(f"\nPython {used.python}, PostgreSQL {used.postgresql} and RabbitMQ {used.rabbitmq}: {result}")
    assert documented()["`make test-images`: Debian unstable"] == used
