"""In an application the package logs where the application says, and before that warnings and errors on stderr."""

import subprocess
import sys

LOG = "from relay.consume.consumer import log; log.debug('batch.applied'); log.warning('broker.degraded', host='b1');"


def said(configure: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", configure + LOG], check=True, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_it_shows_warnings_on_stderr_until_the_application_configures_a_log() -> None:
    assert said("") == ("", "WARNING event='broker.degraded' host='b1'\n")


def test_a_summary_is_one_readable_line_and_an_exception_shows_where_and_no_values() -> None:
    failing = """
def handler():
    raise ValueError("secret")
try:
    handler()
except ValueError as error:
    log.warning("message.failed", type="Issued", summary="Issued a/1: ValueError: boom", exc_info=error)
"""
    done = subprocess.run([sys.executable, "-c", LOG + failing], check=True, capture_output=True, text=True)

    _, line, *frames = done.stderr.splitlines()
    assert line == "WARNING message.failed: Issued a/1: ValueError: boom"
    assert frames[-1].strip().endswith("in handler")
    assert "secret" not in done.stderr


def test_it_follows_the_standard_librarys_logging() -> None:
    assert said("import logging; logging.basicConfig();") == (
        "",
        "WARNING:relay:event='broker.degraded' host='b1'\n",
    )


def test_it_follows_structlog() -> None:
    configure = "import structlog; structlog.configure([structlog.processors.JSONRenderer(sort_keys=True)]);"

    assert said(configure) == ('{"event": "batch.applied"}\n{"event": "broker.degraded", "host": "b1"}\n', "")
