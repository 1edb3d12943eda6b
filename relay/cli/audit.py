"""`relay audit`."""

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.printing import print_json, print_table
from relay.observe.printable import utc
from relay.operate import audit
from relay.operate.audit import Deed, as_csv

LIST_COLUMNS = ("done at", "by", "command", "target", "rows", "why", "job")

app = App(name="audit", help="See who has changed or revealed what, and why.")


@app.command(name="list")
def list_(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    by: Annotated[str | None, Parameter(help="Only by this person or program; a part of the name is enough.")] = None,
    command: Annotated[
        str | None, Parameter(help="Only of this command, as in `parked retry`; `parked` is all of its commands.")
    ] = None,
    job: Annotated[int | None, Parameter(help="Only of this job.")] = None,
    since: Annotated[str | None, Parameter(help="At or after: a moment, or so long ago: 2h.")] = None,
    until: Annotated[str | None, Parameter(help="Before: a moment, or so long ago: 2h.")] = None,
    rows: Annotated[bool, Parameter(help="A line for each row of a job, not one for the job.")] = False,
    limit: Annotated[int, Parameter(help="At most so many.", validator=validators.Number(gte=1))] = 100,
    output: Annotated[
        Literal["text", "json", "csv"],
        Parameter(name=["--output", "-o"], help="A table for people (tab-separated in a pipe), JSON, or CSV."),
    ] = "text",
) -> ExitCode:
    """List what was done, the newest first; a job is one line."""
    asked = audit.ListAudit.model_construct(
        by=by, command=command, job=job, since=since, until=until, rows=rows, limit=limit
    )
    found = options.operations().do(audit.list_, asked).deeds
    if output == "json":
        print_json(found)
    elif output == "csv":
        sys.stdout.write(as_csv(found, header=True))
    else:
        print_table(LIST_COLUMNS, [_row(deed) for deed in found], wide={"why"})
    return ExitCode.DONE


def _row(deed: Deed) -> tuple[object, ...]:
    return (utc(deed.done_at), deed.done_by, deed.command, deed.target, deed.rows, deed.why, deed.job)
