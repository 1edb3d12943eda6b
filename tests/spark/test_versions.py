"""docs/versions.md names what these tests run on."""

import os
import platform
from collections.abc import Callable

import pyspark
import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.releases import NEWEST, OLDEST
from tests.support.versions import Versions, documented, postgres_version, rabbitmq_version, two_numbers

OF_MAKE_TEST = "4.3"


@pytest.mark.skipif("CI" not in os.environ, reason="another machine may have other versions than the table")
def test_the_table_names_what_this_run_uses(
    postgres_of: Callable[[int], PostgresServer], rabbitmq: RabbitServer
) -> None:
    servers = ", ".join(str(postgres_version(postgres_of(each))) for each in (OLDEST, NEWEST))
    release = two_numbers(pyspark.__version__)
    used = Versions(two_numbers(platform.python_version()), servers, rabbitmq_version(rabbitmq), release)
    command = "make test" if release == OF_MAKE_TEST else f"make test-spark SPARK={release}"

    assert documented()[f"`{command}`"] == used
