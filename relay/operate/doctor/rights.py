"""What the relay's role must be granted, and what of it is missing.

tests/doctor/test_rights.py compares the list with config/roles.sql.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import psycopg
from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.operate.doctor.finding import Finding, Verdict
from relay.retention.kind import FORGET, FORGET_BATCHES, kept_days, kept_failures
from relay.servers.postgres.database import one

MARKED = ("state", "attempts", "available_at", "last_error", "held_behind", "parked_at", "sent_at", "quarantine")
ADDRESS = ("exchange", "routing_key")
ORDERED = (
    "kind", "source", "made_by", "why", "filter", "to_exchange", "routing_key", "selected", "rate", "stages",
    "stop_when_failing",
)  # fmt: skip
NOTES = ("command", "target", "done_by", "why", "job")
LETTER_NOTES = (
    "command", "queue", "sent_to", "done_by", "why", "job", "message_id", "event_type", "key", "reason",
    "last_failed_at",
)  # fmt: skip
PROGRESS = ("state", "selected", "done", "failed", "released", "stage", "position", "saved_at", "paused_because")
HELD = (
    "position", "consumer_name", "key", "message_id", "event_type", "exchange", "routing_key", "held_at", "attempts",
    "begun", "first_failed_at", "last_failed_at", "due_at", "exception", "error", "reason",
)  # fmt: skip


class Standing(Enum):
    """Whether the role has a right."""

    HELD = auto()
    MISSING = auto()
    NO_OBJECT = auto()  # what the right is for does not exist


@dataclass(frozen=True, slots=True)
class Grant:
    """A privilege on an object of the schema, or on some columns of it."""

    privilege: str
    kind: str  # SCHEMA, TABLE, SEQUENCE or FUNCTION
    name: str
    columns: tuple[str, ...] = ()
    command: str = "run"  # which does not work without

    def statement(self, schema: str, role: str) -> str:
        """Return the SQL that grants it."""
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        kind = "" if self.kind == "TABLE" else f"{self.kind} "
        name = schema if self.kind == "SCHEMA" else f"{schema}.{self.name}"
        return f"GRANT {self.privilege}{columns} ON {kind}{name} TO {role}"


GRANTS = (
    Grant("USAGE", "SCHEMA", ""),
    Grant("SELECT", "TABLE", "message"),
    Grant("UPDATE", "TABLE", "message", MARKED),
    Grant("UPDATE", "TABLE", "message", ADDRESS, command="quarantine"),
    Grant("SELECT", "TABLE", "message_count", command="status"),
    Grant("SELECT", "TABLE", "message_state", command="status"),
    Grant("SELECT", "TABLE", "message_pending"),
    Grant("DELETE", "TABLE", "message_pending"),
    Grant("INSERT", "TABLE", "message_sent"),
    Grant("SELECT", "SEQUENCE", "message_id_seq"),
    Grant("EXECUTE", "FUNCTION", "ensure_sent_days(date, integer)"),
    Grant("EXECUTE", "FUNCTION", "sent(timestamp with time zone, timestamp with time zone)", command="doctor"),
    *(
        Grant(each, "TABLE", table)
        for table in ("node", "quarantine")
        for each in ("SELECT", "INSERT", "UPDATE", "DELETE")
    ),
    *(Grant(each, "TABLE", "lane_floor") for each in ("SELECT", "INSERT", "UPDATE")),
    Grant("SELECT", "TABLE", "lane_pause"),
    *(Grant(each, "TABLE", "lane_pause", command="lanes") for each in ("INSERT", "DELETE")),
    *(Grant(each, "TABLE", "published") for each in ("SELECT", "INSERT", "DELETE")),
    Grant("SELECT", "TABLE", "archived_day", command="config alerts"),  # one of them goes by its metric
    Grant("SELECT", "TABLE", "batch"),
    Grant("EXECUTE", "FUNCTION", "give_up_batch(text, bigint, text, text)", command="batches"),
    Grant("SELECT", "TABLE", "migration"),
    Grant("SELECT", "TABLE", "job"),
    Grant("INSERT", "TABLE", "job", ORDERED, command="jobs"),
    Grant("UPDATE", "TABLE", "job", PROGRESS, command="jobs"),
    *(Grant(right, "TABLE", "job_failure", command="jobs") for right in ("SELECT", "INSERT")),
    *(Grant(right, "TABLE", "job_row", command="jobs") for right in ("SELECT", "INSERT", "DELETE")),
    *(Grant(right, "TABLE", "failure", command="failures") for right in ("SELECT", "INSERT")),
    Grant("UPDATE", "TABLE", "failure", ("retried",), command="failures"),
    Grant("SELECT", "TABLE", "parked_failure", command="failures"),
    Grant("SELECT", "TABLE", "held_message", HELD, command="failures"),
    Grant("UPDATE", "TABLE", "held_message", ("due_at",), command="held"),
    Grant("SELECT", "TABLE", "processed_message", command="reconcile"),
    Grant("SELECT", "TABLE", "consumer_queue", command="reconcile"),
    *(Grant("SELECT", "TABLE", table, command="pool") for table in ("pool", "pool_member", "pool_partition")),
    Grant("DELETE", "TABLE", "pool_member", command="pool"),
    Grant("UPDATE", "TABLE", "pool_partition", ("epoch", "member", "wanted_by", "taken_from", "since"), command="pool"),
    *(Grant(right, "TABLE", "pool_master", command="pool") for right in ("SELECT", "INSERT", "UPDATE")),
    Grant("SELECT", "TABLE", "dead_letter_audit", command="dead-letters"),
    Grant("INSERT", "TABLE", "dead_letter_audit", LETTER_NOTES, command="dead-letters"),
    Grant("SELECT", "TABLE", "operator_audit", command="jobs"),
    Grant("INSERT", "TABLE", "operator_audit", NOTES, command="parked"),
)

ROLE = "SELECT quote_ident(current_user)"
# By their ids, which are told also where the schema itself is closed to us; no row: there is no such thing.
HAS_ON_SCHEMA = SQL("SELECT has_schema_privilege(oid, %(privilege)s) FROM pg_namespace WHERE nspname = %(schema)s")
HAS_ON_TABLE = SQL("""
    SELECT has_table_privilege(oid, %(privilege)s) FROM pg_class
    WHERE relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND relname = %(name)s
""")
HAS_ON_COLUMNS = SQL("""
    SELECT coalesce(bool_and(has_column_privilege(attrelid, attnum, %(privilege)s)), false)
    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
    WHERE relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND relname = %(name)s
        AND attname = ANY (%(columns)s)
    HAVING count(*) = cardinality(%(columns)s::text[])
""")
HAS_ON_SEQUENCE = SQL("""
    SELECT has_sequence_privilege(oid, %(privilege)s) FROM pg_class
    WHERE relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND relname = %(name)s
""")
HAS_ON_FUNCTION = SQL("""
    SELECT has_function_privilege(oid, %(privilege)s) FROM pg_proc
    WHERE pronamespace = to_regnamespace(quote_ident(%(schema)s))
        AND proname || '(' || oidvectortypes(proargtypes) || ')' = %(name)s
""")
ASK = {"SCHEMA": HAS_ON_SCHEMA, "TABLE": HAS_ON_TABLE, "SEQUENCE": HAS_ON_SEQUENCE, "FUNCTION": HAS_ON_FUNCTION}


def rights(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each grant that is missing; of what does not exist nothing is said, `relay migrate` makes it."""
    check, schema = "database.rights", settings.database.schema_name
    (role,) = one(connection.execute(ROLE).fetchone())
    standings = {grant: _standing_of(connection, schema, grant) for grant in GRANTS}
    missing = [grant for grant, standing in standings.items() if standing is Standing.MISSING]
    if missing:
        commands = sorted({grant.command for grant in missing}, key=lambda name: name != "run")
        named = " and ".join(f"`relay {command}`" for command in commands)
        words = f"role {role} lacks {len(missing)} of {len(GRANTS)} rights, without which {named} does not work"
        verdict = Verdict.FAILED if "run" in commands else Verdict.WARNING
        yield Finding(check, verdict, words, "; ".join(grant.statement(schema, role) for grant in missing))
    elif Standing.NO_OBJECT in standings.values():
        yield Finding(check, Verdict.SKIPPED, "the tables are not all there", "run `relay migrate` first")
    else:
        yield Finding(check, Verdict.OK, f"role {role} may do all that the relay does")


MAY_DROP = "SELECT has_function_privilege(%(function)s, 'EXECUTE')"


def ownership(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """See that this role may drop the days that the relay is to drop."""
    check, keeps, batches = "database.ownership", kept_days(settings.relay), settings.relay.batch_retention_days
    if not keeps and batches is None:
        yield Finding(check, Verdict.SKIPPED, "relay.retention is off: this relay drops no days")
        return
    (role,) = one(connection.execute(ROLE).fetchone())
    forgets = [] if kept_failures(keeps) is None else [FORGET]
    forgets += [] if batches is None else [FORGET_BATCHES]
    functions = [f"{settings.database.schema_name}.{name}" for name in [*(kind.function for kind in keeps), *forgets]]
    try:
        held = {name: connection.execute(MAY_DROP, {"function": name}).fetchone() == (True,) for name in functions}
    except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
        yield Finding(check, Verdict.SKIPPED, "the functions that drop days are not there", "run `relay migrate` first")
        return
    kept = {kind.setting: keep for kind, keep in keeps.items()}
    kept |= {} if batches is None else {"relay.batch_retention": batches}
    told = ", ".join(f"{setting} is {keep} days" for setting, keep in kept.items())
    if missing := ", ".join(name for name, may in held.items() if not may):
        words = f"{told}, and role {role} may not call {missing}: the tables grow"
        remedy = (
            f"GRANT EXECUTE ON FUNCTION {missing} TO {role}; or GRANT outbox_retention to it; or"
            ' relay.retention = "off", and `relay retention` by another role'
        )
        yield Finding(check, Verdict.WARNING, words, remedy)
    else:
        yield Finding(check, Verdict.OK, f"{told}, and role {role} may drop what is older")


def _standing_of(connection: psycopg.Connection, schema: str, grant: Grant) -> Standing:
    statement = HAS_ON_COLUMNS if grant.columns else ASK[grant.kind]
    parameters = {
        "privilege": grant.privilege,
        "schema": schema,
        "name": grant.name,
        "columns": list(grant.columns),
    }
    row = connection.execute(statement, parameters).fetchone()
    if row is None:
        return Standing.NO_OBJECT
    return Standing.HELD if row[0] else Standing.MISSING
