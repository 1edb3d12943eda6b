"""Run the tests of an application in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

NOT_ON_LINUX = """
import relay.pytest_plugin

relay.pytest_plugin.IS_LINUX = False
"""


def run_suite(tests: str, folder: Path, server_url: str = "", *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shop.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments, folder],
        cwd=folder,
        env={**os.environ, "OUTBOX_TEST_SERVER_URL": server_url},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
