"""The tests of the engine, of the doctor, of consumers and of dead letters, on PostgreSQL 17 and RabbitMQ 4."""

import os
import re
import subprocess
import sys

import psycopg
import pytest

from tests.container.podman import ROOT
from tests.support.given import GivenPostgres, GivenRabbit

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("servers", ["debian"], indirect=True),
]


@pytest.mark.parametrize("tests", ["tests/engine", "tests/doctor", "tests/consume", "tests/dead_letters"])
def test_they_pass_on_them(
    tests: str, postgres: GivenPostgres, rabbitmq: GivenRabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = rabbitmq.ctl("version").strip(), major_version(postgres)
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
        print(f"\n{tests} on RabbitMQ {versions[0]} and PostgreSQL {versions[1]}: {done.stdout.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"4\.", versions[0])
    assert versions[1] == 17


def major_version(postgres: GivenPostgres) -> int:
    with psycopg.connect(postgres.admin_url) as connection:
        return connection.info.server_version // 10_000
