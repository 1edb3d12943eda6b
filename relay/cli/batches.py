"""`relay batches`."""

from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Consent, Loss, show_loss
from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import Most, Output
from relay.cli.printing import print_json, print_pairs, print_table, say
from relay.errors import UsageError
from relay.observe.printable import utc
from relay.operate import batches
from relay.operate.batches import BatchState, BatchStatus

LIST_COLUMNS = ("application", "version", "state", "at", "pieces", "rows", "tables", "seconds", "repeats")

app = App(name="batches", help="See what Spark has written; give up a batch that was begun and will not be finished.")

AppId = Annotated[str, Parameter(help="Its txnAppId.")]
Version = Annotated[int, Parameter(help="Its txnVersion.")]


@app.command(name="list")
def list_(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    limit: Most = 20,
    output: Output = "text",
) -> ExitCode:
    """List the newest batches: first those that are begun and not committed."""
    found = options.operations().do(batches.list_, batches.ListBatches.model_construct(limit=limit))
    if output == "json":
        print_json(found)
    else:
        print_table(LIST_COLUMNS, [_row(batch) for batch in found], wide={"tables"})
    return ExitCode.DONE


@app.command
def show(
    app_id: AppId,
    version: Version,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    output: Output = "text",
) -> ExitCode:
    """Show one batch."""
    batch = options.operations().do(batches.show, _named(app_id, version))
    if output == "json":
        print_json(batch)
    else:
        print_pairs([(name.replace("_", " "), getattr(batch, name)) for name in BatchStatus.__dataclass_fields__])
    return ExitCode.DONE


@app.command
def give_up(
    app_id: AppId,
    version: Version,
    /,
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    consent: Consent = Consent(),
) -> ExitCode:
    """Let no more of a batch be written, for good; its written pieces stay, and their events are sent."""
    consent.check()
    operations = options.operations()
    found = operations.do(batches.show, _named(app_id, version))
    if consent.dry_run:
        if found.state is not BatchState.BEGUN:
            raise UsageError(f"batch {app_id!r} version {version} is {found.state.replace('_', ' ')} already")
        show_loss(_loss(found))
        return ExitCode.DONE
    if not consent.is_given(lambda: _loss(found)):
        return ExitCode.FAILED
    asked = batches.GiveUp.model_construct(app_id=app_id, version=version, why=consent.reason)
    given_up = operations.do(batches.give_up, asked, by=consent.operator)
    say(f"gave up batch {given_up.name}. There stay {given_up.stands}")
    say(f"(writer = '{app_id}' and batch_id = {version} in outbox.message). Write what is missing under another name")
    return ExitCode.DONE


def _named(app_id: str, version: int) -> batches.ShowBatch:
    return batches.ShowBatch.model_construct(app_id=app_id, version=version)


def _loss(batch: BatchStatus) -> Loss:
    return Loss(f"give up batch {batch.name} for good. There stay {batch.stands}", batch.at, [_row(batch)])


def _row(batch: BatchStatus) -> tuple[object, ...]:
    pieces = f"{batch.pieces} of {batch.partitions}"
    counts = (pieces, batch.rows, batch.tables or "", batch.seconds, batch.repeats)
    return (batch.app_id, batch.version, batch.state.replace("_", " "), utc(batch.at), *counts)
