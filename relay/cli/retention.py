"""`relay retention`."""

from collections.abc import Iterable
from datetime import UTC, datetime, time
from typing import Annotated

from cyclopts import Parameter

from relay.cli.consent import Consent, Loss
from relay.cli.exit_code import ExitCode, exit_code
from relay.cli.options import DatabaseOptions, InboxOptions, Length, Output
from relay.cli.printing import aside, complain, counted, print_json, print_table, say
from relay.config.settings import DatabaseSettings
from relay.errors import UsageError
from relay.operate.reconcile.inbox import FLAG, OWN, of_inbox
from relay.operate.retention import (
    count_old_batches,
    drop_old_days,
    forget_batches,
    keep_batches_of,
    keeps_of,
    look_at_old_days,
)
from relay.retention.day import Fate, OldDay
from relay.retention.kind import INBOX, sent_kind

COLUMNS = ("table", "day", "rows", "bytes", "fate", "reason")


def retention(
    *,
    options: DatabaseOptions = DatabaseOptions(),
    keep: Annotated[Length | None, Parameter(help='In place of relay.retention: "30 days".')] = None,
    keep_inbox: Annotated[Length | None, Parameter(help='In place of relay.inbox_retention: "60 days".')] = None,
    keep_batches: Annotated[Length | None, Parameter(help='In place of relay.batch_retention: "400 days".')] = None,
    inbox: InboxOptions = InboxOptions(),
    consent: Consent = Consent(),
    output: Output = "text",
) -> ExitCode:
    """Drop days of sent rows and of the inbox that are older than retention allows, as a running relay does each hour.

    Names of Spark's batches are forgotten where relay.batch_retention says so. With --inbox only days of that inbox go.
    """
    settings = options.load().settings
    keeps, batches = keeps_of(settings.relay, keep, keep_inbox), keep_batches_of(settings.relay, keep_batches)
    if inbox != InboxOptions():
        keeps.pop(sent_kind(settings.relay), None)
        batches = None
    if not keeps and batches is None:
        raise UsageError('retention is off: --keep "14 days" tells what to keep')
    database = inbox.settings(settings.database)
    consent.check()
    with of_inbox(FLAG if inbox.url else OWN):
        if consent.dry_run:
            done = look_at_old_days(database, keeps)
            forgotten = _old_batches(database, batches)
        elif consent.is_given(lambda: _loss(look_at_old_days(database, keeps), _old_batches(database, batches))):
            done = drop_old_days(database, keeps, by=consent.operator, why=consent.reason, tell=_announce)
            forgotten = batches and forget_batches(database, batches, by=consent.operator, why=consent.reason)
        else:
            return ExitCode.FAILED
    postponed = [day for day in done if day.fate is Fate.POSTPONED]
    others = [day for day in done if day.fate is not Fate.POSTPONED]
    if output == "json":
        days = {"keep_days": keeps.get(sent_kind(settings.relay)), "keep_inbox_days": keeps.get(INBOX)}
        told = {"dry_run": consent.dry_run, "days": [_as_json(day) for day in done], "batches_forgotten": forgotten}
        print_json({**days, "keep_batches_days": batches, **told})
    else:
        print_table(COLUMNS, [[getattr(day, name) for name in COLUMNS] for day in done])
        say(f"{'would drop' if consent.dry_run else 'dropped'} {_total(others)}")
        if forgotten:
            say(f"{'would forget' if consent.dry_run else 'forgot'} {_names(forgotten)}")
    for reason in dict.fromkeys(day.reason for day in postponed):
        complain(f"postponed {_total(day for day in postponed if day.reason == reason)}: {reason}")
    return exit_code(done=len(others), left=len(postponed))


def _old_batches(database: DatabaseSettings, keep: int | None) -> int | None:
    return None if keep is None else count_old_batches(database, keep)


def _names(batches: int) -> str:
    return f"{counted(batches, 'name')} of Spark's batches, which are written if they come again"


def _loss(found: list[OldDay], batches: int | None) -> Loss:
    old = [day for day in found if day.fate is Fate.OLD]
    excerpt = [(day.table, f"{day.rows} rows", f"{day.bytes} bytes") for day in old]
    oldest = min((datetime.combine(day.day, time(), UTC) for day in old), default=None)
    forgets = f" and forget {_names(batches)}" if batches else ""
    return Loss(f"drop {_total(old)}{forgets}", oldest, excerpt)


def _announce(found: list[OldDay]) -> None:
    if old := [day for day in found if day.fate is Fate.OLD]:
        days = [day.day for day in old]
        aside(f"drops {_total(old)}, from {min(days)} to {max(days)}")


def _total(days: Iterable[OldDay]) -> str:
    listed = list(days)
    rows, size = sum(day.rows or 0 for day in listed), sum(day.bytes for day in listed)
    return f"{counted(len(listed), 'day')}: {rows} rows, {size} bytes"


def _as_json(day: OldDay) -> dict[str, object]:
    return {name: getattr(day, name) for name in COLUMNS}
