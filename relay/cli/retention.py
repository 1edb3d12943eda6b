"""`relay retention`."""

from collections.abc import Iterable
from datetime import UTC, datetime, time
from typing import Annotated

from cyclopts import Parameter

from relay.cli.consent import Consent, Loss
from relay.cli.options import DatabaseOptions, InboxSchema, InboxUrl, Length, Output, inbox_settings
from relay.cli.printing import aside, complain, print_json, print_table, say
from relay.config.settings import RelaySettings, days_kept
from relay.errors import UsageError
from relay.operate.reconcile.inbox import FLAG, of_inbox
from relay.operate.retention import drop_old_days, look_at_old_days
from relay.retention.day import Fate, OldDay
from relay.retention.kind import INBOX, Kind, kept_days, sent_kind

COLUMNS = ("table", "day", "rows", "bytes", "fate", "reason")


def retention(
    *,
    options: DatabaseOptions | None = None,
    keep: Annotated[Length | None, Parameter(help='In place of relay.retention: "30 days".')] = None,
    keep_inbox: Annotated[Length | None, Parameter(help='In place of relay.inbox_retention: "60 days".')] = None,
    inbox: InboxUrl = None,
    inbox_schema: InboxSchema = None,
    consent: Consent | None = None,
    output: Output = "text",
) -> int:
    """Drop days of sent rows and of the inbox that are older than is to be kept, as a running relay does each hour.

    With --inbox those of this inbox alone.
    """
    consent = consent or Consent()
    settings = (options or DatabaseOptions()).load().settings
    keeps = _keeps(settings.relay, keep, keep_inbox)
    if inbox is not None or inbox_schema is not None:
        keeps.pop(sent_kind(settings.relay), None)
    if not keeps:
        raise UsageError('retention is off: --keep "14 days" tells what to keep')
    database = inbox_settings(settings.database, inbox, inbox_schema)
    consent.check()
    with of_inbox(FLAG if inbox else "database.url"):
        if consent.dry_run:
            done = look_at_old_days(database, keeps)
        elif consent.is_given(lambda: _loss(look_at_old_days(database, keeps))):
            done = drop_old_days(database, keeps, by=consent.operator, why=consent.reason, tell=_announce)
        else:
            return 1
    postponed = [day for day in done if day.fate is Fate.POSTPONED]
    others = [day for day in done if day.fate is not Fate.POSTPONED]
    if output == "json":
        days = {"keep_days": keeps.get(sent_kind(settings.relay)), "keep_inbox_days": keeps.get(INBOX)}
        print_json({**days, "dry_run": consent.dry_run, "days": [_as_json(day) for day in done]})
    else:
        print_table(COLUMNS, [[getattr(day, name) for name in COLUMNS] for day in done])
        say(f"{'would drop' if consent.dry_run else 'dropped'} {_total(others)}")
    for reason in dict.fromkeys(day.reason for day in postponed):
        complain(f"postponed {_total(day for day in postponed if day.reason == reason)}: {reason}")
    if not postponed:
        return 0
    return 3 if others else 1


def _keeps(relay: RelaySettings, keep: str | None, keep_inbox: str | None) -> dict[Kind, int]:
    """Tell how many days are kept of what is not kept for ever, as the relay does."""
    given = {"retention": ("--keep", keep), "inbox_retention": ("--keep-inbox", keep_inbox)}
    keeps = kept_days(
        relay.model_copy(update={name: _days(flag, text) for name, (flag, text) in given.items() if text is not None})
    )
    if keep_inbox is not None and keeps.get(INBOX) != days_kept(keep_inbox):
        raise UsageError(
            f"--keep-inbox {keep_inbox!r} is less than sent rows are kept: a replay of them would meet an inbox"
            " that has forgotten what was applied"
        )
    return keeps


def _days(flag: str, keep: str) -> str:
    """Give the text, of which `days_kept` makes something."""
    try:
        days_kept(keep)
    except ValueError:
        raise UsageError(
            f'{flag} takes days as in "30 days" or "30d", from 1 to 99999, or "off"; not {keep!r}'
        ) from None
    return keep


def _loss(found: list[OldDay]) -> Loss:
    old = [day for day in found if day.fate is Fate.OLD]
    excerpt = [(day.table, f"{day.rows} rows", f"{day.bytes} bytes") for day in old]
    oldest = min((datetime.combine(day.day, time(), UTC) for day in old), default=None)
    return Loss(f"drop {_total(old)}", oldest, excerpt)


def _announce(found: list[OldDay]) -> None:
    if old := [day for day in found if day.fate is Fate.OLD]:
        days = [day.day for day in old]
        aside(f"drops {_total(old)}, from {min(days)} to {max(days)}")


def _total(days: Iterable[OldDay]) -> str:
    counted = list(days)
    rows, size = sum(day.rows or 0 for day in counted), sum(day.bytes for day in counted)
    return f"{len(counted)} {'day' if len(counted) == 1 else 'days'}: {rows} rows, {size} bytes"


def _as_json(day: OldDay) -> dict[str, object]:
    return {name: getattr(day, name) for name in COLUMNS}
