"""`relay migrate`."""

import sys
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, validators

from relay.cli.consent import Consent, Loss
from relay.cli.exit_code import ExitCode
from relay.cli.options import DatabaseOptions, Seconds
from relay.cli.printing import aside, print_table, say
from relay.config.settings import DatabaseSettings, Settings
from relay.errors import UsageError
from relay.logger import get_logger
from relay.observe.log import set_up
from relay.operate.schema import migrate as operate
from relay.operate.schema.downgrade import preview
from relay.operate.schema.lock_wait import LOCK_TIMEOUT, WAIT, LockLimits
from relay.operate.session import session
from relay.servers.postgres.database import login_of

log = get_logger(__name__)
POSITIVE = validators.Number(gt=0, lte=86_400)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """How long a migration waits for its locks."""

    lock_timeout: Annotated[
        Seconds,
        Parameter(help="How long one try waits for its locks; writers wait behind it.", validator=POSITIVE),
    ] = LOCK_TIMEOUT
    wait: Annotated[
        Seconds, Parameter(help="How long to try again for the locks of one version.", validator=POSITIVE)
    ] = WAIT


def migrate(
    *,
    options: DatabaseOptions = DatabaseOptions(),
    sql: Annotated[bool, Parameter(help="Print the statements and connect to nothing.")] = False,
    check: Annotated[bool, Parameter(help="Change nothing; exit with 1 when the tables are behind.")] = False,
    downgrade: Annotated[
        str | None, Parameter(help="Go back to this version; `base` drops every table with all its rows.")
    ] = None,
    consent: Consent = Consent(),
    force: Annotated[bool, Parameter(help="Downgrade also while relays run on the tables.")] = False,
    locks: LockOptions = LockOptions(),
) -> ExitCode:
    """Bring the outbox tables to the version of this release. Several may run at once.

    Tables that are ahead of this release are left as they are: with exit code 0 when this release runs on them.
    """
    if sum((sql, check, downgrade is not None)) > 1:
        raise UsageError("--sql, --check and --downgrade exclude each other")
    if downgrade is None and (consent.dry_run or consent.yes or consent.why or force):
        raise UsageError("--dry-run, --yes, --why and --force go with --downgrade")
    settings = options.load().settings
    database = settings.database
    if sql:
        operate.write_sql(database, sys.stdout)
        return ExitCode.DONE
    limits = LockLimits(locks.lock_timeout, locks.wait)
    if downgrade is not None:
        return _downgrade(settings, downgrade, limits, consent, force=force)
    if not check:
        operate.migrate(database, limits=limits, tell=aside)
    with session(database) as tables:  # which refuses what is missing, behind, or too far ahead
        if check:
            aside(login_of(tables.connection))
    _say_version(database)
    return ExitCode.DONE


def _downgrade(settings: Settings, revision: str, limits: LockLimits, consent: Consent, *, force: bool) -> ExitCode:
    consent.check()
    database = settings.database
    cost = preview(database, revision)
    print_table(("table", "state", "rows"), cost.rows)
    if consent.dry_run:
        if cost.relays:
            aside(f"these relays run on the tables: {', '.join(cost.relays)}")
        return ExitCode.DONE
    if not force:
        cost.refuse_running()
    if not consent.is_given(lambda: Loss(f"drop {cost.total} rows for good and go back to version {revision}")):
        return ExitCode.FAILED
    found = operate.current_revision(database)
    operate.downgrade(database, revision, limits=limits, tell=aside)
    set_up(settings.log)
    log.warning(
        "schema.downgraded",
        schema=database.schema_name,
        found=found,
        revision=revision,
        rows=cost.total,
        by=consent.operator,
        why=consent.reason,
    )
    _say_version(database)
    return ExitCode.DONE


def _say_version(database: DatabaseSettings) -> None:
    say(f"schema {database.schema_name} is of version {operate.current_revision(database) or 'none'}")
