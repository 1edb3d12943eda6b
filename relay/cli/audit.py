"""`relay audit`."""

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import Flags, Most
from relay.cli.printing import print_json, print_table
from relay.observe.printable import utc
from relay.operate import audit
from relay.operate.audit import AuditFilter, Deed, as_csv

LIST_COLUMNS = ("done at", "by", "command", "target", "rows", "why", "job")

app = App(name="audit", help="See who has changed or revealed what, and why.")


@app.command(name="list")
def list_(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    filters: Annotated[AuditFilter, Flags] = AuditFilter(),
    limit: Most = 100,
    output: Annotated[
        Literal["text", "json", "csv"],
        Parameter(name=["--output", "-o"], help="A table for people (tab-separated in a pipe), JSON, or CSV."),
    ] = "text",
) -> ExitCode:
    """List what was done, the newest first; a job is one line."""
    found = options.operations().do(audit.list_, audit.ListAudit.model_construct(**dict(filters), limit=limit)).deeds
    if output == "json":
        print_json(found)
    elif output == "csv":
        sys.stdout.write(as_csv(found, header=True))
    else:
        print_table(LIST_COLUMNS, [_row(deed) for deed in found], wide={"why"})
    return ExitCode.DONE


def _row(deed: Deed) -> tuple[object, ...]:
    return (utc(deed.done_at), deed.done_by, deed.command, deed.target, deed.rows, deed.why, deed.job)
