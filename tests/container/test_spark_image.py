"""The image of Spark runs the example of the project as it is submitted to any Spark."""

import json
from pathlib import Path

import psycopg
import pytest

from tests.container.podman import BASE, Podman

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1200),
    pytest.mark.parametrize("servers", ["private"], indirect=True),
]

PURCHASES = " 00001 19970101  1   11.77\n 00002 19970112  1   12.00\n this is no purchase\n"


def test_the_invoices_job_writes_a_file(
    podman: Podman, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    podman.build("spark")
    (tmp_path / "purchases.txt").write_text(PURCHASES)
    tmp_path.chmod(0o755)
    # As strict as for the relay, but for what Spark must write somewhere.
    options = ["--rm", "--network=host", "--read-only", "--cap-drop=all", "--timeout=600"]
    mounted = f"--volume={tmp_path}:/data:ro"

    done = podman(
        "run",
        *options,
        mounted,
        f"--env=RELAY_DATABASE_URL={database_url}",
        "outbox-relay-spark",
        "examples/pipeline/invoices.py",
        "--input=/data/purchases.txt",
        seconds=300,
    )

    with capsys.disabled():
        mib = (podman.size("outbox-relay-spark") - podman.size(BASE)) / 2**20
        print(f"\nimage spark: {mib:.0f} MiB above its base")
    assert done.code == 0, done.out + done.err
    summary = json.loads(done.out.splitlines()[-1])
    assert (summary["invoices"], summary["quarantined"]) == (2, 1)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM outbox.message").fetchone() == (2,)
