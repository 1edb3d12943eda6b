"""The tests of the engine, of the doctor, of consumers and of dead letters, on PostgreSQL 17 and RabbitMQ 4."""

import os
import platform
import subprocess
import sys

import pytest

from tests.container.podman import ROOT
from tests.support.given import GivenPostgres, GivenRabbit
from tests.support.versions import Versions, documented, postgres_version, rabbitmq_version, two_numbers

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("servers", ["debian"], indirect=True),
]


@pytest.mark.parametrize("tests", ["tests/engine", "tests/doctor", "tests/consume", "tests/dead_letters"])
def test_they_pass_on_them(
    tests: str, postgres: GivenPostgres, rabbitmq: GivenRabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    used = Versions(two_numbers(platform.python_version()), str(postgres_version(postgres)), rabbitmq_version(rabbitmq))
    environment = {**os.environ, **postgres.variables(), **rabbitmq.variables()}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    with capsys.disabled():
        print(f"\n{tests} on RabbitMQ {used.rabbitmq} and PostgreSQL {used.postgresql}: {done.stdout.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert documented()["`make test-images`: Debian 13"] == used
