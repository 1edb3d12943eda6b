"""The commands of the pages that start a Spark job name a job that exists, with its options."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tests.prose.pages import ROOT, pages
from tests.spark.running import module_of

START = re.compile(
    r"^(?:docker run .*outbox-relay-spark (?:jobs|examples/pipeline)/"
    r"|spark-submit \"\$\([\w -]+\)/(?:pipeline/)?"
    r"|outbox-spark )(\w+)(?:\.py\"?)? (--.*)$",
    re.MULTILINE,
)


def starts(page: Path) -> list[tuple[str, str]]:
    return START.findall(page.read_text().replace("\\\n", " "))


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages() if starts(page)])
def test_each_job_exists_with_its_options(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_DATABASE_URL", "postgresql://user@host/database")

    for job, options in starts(ROOT / page):
        parser: argparse.ArgumentParser = importlib.import_module(module_of(f"{job}.py"))._parser()
        parser.parse_args(shlex.split(options, comments=True))
