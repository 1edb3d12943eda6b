"""In an application the package logs where the application says, and nowhere before that."""

import subprocess
import sys

LOG = "from relay.consume.consumer import log; log.debug('batch.applied'); log.warning('broker.degraded', host='b1');"


def said(configure: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", configure + LOG], check=True, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_it_is_silent_until_the_application_configures_a_log() -> None:
    assert said("") == ("", "")


def test_it_follows_the_standard_librarys_logging() -> None:
    assert said("import logging; logging.basicConfig();") == (
        "",
        "WARNING:relay:event='broker.degraded' host='b1'\n",
    )


def test_it_follows_structlog() -> None:
    configure = "import structlog; structlog.configure([structlog.processors.JSONRenderer(sort_keys=True)]);"

    assert said(configure) == ('{"event": "batch.applied"}\n{"event": "broker.degraded", "host": "b1"}\n', "")
