"""`relay retention`."""

from collections.abc import Iterable
from typing import Annotated

from cyclopts import Parameter

from relay.cli.options import DatabaseOptions, Output
from relay.cli.printing import aside, complain, print_json, print_table, say
from relay.engine.retention import Fate, OldDay
from relay.errors import UsageError
from relay.operate.retention import drop_old_days
from relay.settings import days_kept

COLUMNS = ("day", "rows", "bytes", "fate", "reason")


def retention(
    *,
    options: DatabaseOptions | None = None,
    keep: Annotated[str | None, Parameter(help='In place of relay.retention: "30 days".')] = None,
    dry_run: Annotated[bool, Parameter(help="Drop nothing; print the exact count, by day.")] = False,
    output: Output = "text",
) -> int:
    """Drop the days of sent rows that are older than relay.retention, as a running relay does by itself each hour."""
    settings = (options or DatabaseOptions()).load().settings
    days = _days(settings.relay.retention if keep is None else keep)
    done = drop_old_days(settings.database, days, dry_run=dry_run, tell=_announce)
    postponed = [day for day in done if day.fate is Fate.POSTPONED]
    others = [day for day in done if day.fate is not Fate.POSTPONED]
    if output == "json":
        print_json({"keep_days": days, "dry_run": dry_run, "days": [_as_json(day) for day in done]})
    else:
        print_table(COLUMNS, [(day.day, day.rows, day.bytes, day.fate, day.reason) for day in done])
        say(f"{'would drop' if dry_run else 'dropped'} {_total(others)}")
    for reason in dict.fromkeys(day.reason for day in postponed):
        complain(f"postponed {_total(day for day in postponed if day.reason == reason)}: {reason}")
    if not postponed:
        return 0
    return 3 if others else 1


def _days(keep: str) -> int:
    try:
        days = days_kept(keep)
    except ValueError:
        raise UsageError(f'--keep takes days as in "30 days", from 1 to 99999; not {keep!r}') from None
    if days is None:
        raise UsageError('retention is off: --keep "14 days" tells what to keep')
    return days


def _announce(found: list[OldDay]) -> None:
    if old := [day for day in found if day.fate is Fate.OLD]:
        aside(f"drops {_total(old)}, from {old[0].day} to {old[-1].day}")


def _total(days: Iterable[OldDay]) -> str:
    counted = list(days)
    rows, size = sum(day.rows or 0 for day in counted), sum(day.bytes for day in counted)
    return f"{len(counted)} {'day' if len(counted) == 1 else 'days'}: {rows} rows, {size} bytes"


def _as_json(day: OldDay) -> dict[str, object]:
    return {name: getattr(day, name) for name in ("day", "table", "rows", "bytes", "fate", "reason")}
