"""What the relay's role may do, what no migration made, and who else owns, shares, locks or holds up what.

tests/doctor/test_rights.py compares the grants with config/roles.sql.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import psycopg
from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.holders import foreign_locks, held_up
from relay.retention.kind import FORGET, FORGET_BATCHES, kept_days, kept_failures
from relay.servers.postgres.database import one
from relay.servers.postgres.tables import Tables

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
PROGRESS = (
    "state", "selected", "done", "failed", "released", "stage", "position", "saved_at", "paused_because", "watched",
    "waiting", "scanned", "to_scan", "began_at", "began_with",
)  # fmt: skip
HELD = (
    "position", "consumer_name", "key", "message_id", "event_type", "exchange", "routing_key", "held_at", "attempts",
    "begun", "first_failed_at", "last_failed_at", "due_at", "exception", "error", "reason",
)  # fmt: skip


class GrantStanding(Enum):
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
    Grant("SELECT", "TABLE", "quarantine_released", command="quarantine"),
    *(Grant(each, "TABLE", "lane_floor") for each in ("SELECT", "INSERT", "UPDATE")),
    Grant("SELECT", "TABLE", "lane_pause"),
    *(Grant(each, "TABLE", "lane_pause", command="lanes") for each in ("INSERT", "DELETE")),
    *(Grant(each, "TABLE", "published") for each in ("SELECT", "INSERT", "DELETE")),
    Grant("SELECT", "TABLE", "archived_day", command="config alerts"),  # one of them goes by its metric
    Grant("SELECT", "TABLE", "batch"),
    Grant("EXECUTE", "FUNCTION", "give_up_batch(text, bigint, text, text)", command="batches"),
    Grant("EXECUTE", "FUNCTION", "send_edited(bigint, uuid, json, bytea, jsonb, text, text)", command="parked"),
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
# By their ids, which can be asked for also where the schema itself is closed to us; no row: there is no such thing.
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
    check, tables = "database.rights", Tables(connection, settings.database.schema_name)
    (role,) = one(connection.execute(ROLE).fetchone())
    standings = {grant: _standing_of(tables, grant) for grant in GRANTS}
    missing = [grant for grant, standing in standings.items() if standing is GrantStanding.MISSING]
    if missing:
        commands = sorted({grant.command for grant in missing}, key=lambda name: name != "run")
        named = " and ".join(f"`relay {command}`" for command in commands)
        words = f"role {role} lacks {len(missing)} of {len(GRANTS)} rights, without which {named} does not work"
        verdict = Verdict.FAILED if "run" in commands else Verdict.WARNING
        yield Finding(check, verdict, words, "; ".join(grant.statement(tables.schema, role) for grant in missing))
    elif GrantStanding.NO_OBJECT in standings.values():
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
    kept_for = ", ".join(f"{setting} is {keep} days" for setting, keep in kept.items())
    if missing := ", ".join(name for name, may in held.items() if not may):
        words = f"{kept_for}, and role {role} may not call {missing}: the tables grow"
        remedy = (
            f"GRANT EXECUTE ON FUNCTION {missing} TO {role}; or GRANT outbox_retention to it; or"
            ' relay.retention = "off", and `relay retention` by another role'
        )
        yield Finding(check, Verdict.WARNING, words, remedy)
    else:
        yield Finding(check, Verdict.OK, f"{kept_for}, and role {role} may drop what is older")


def _standing_of(tables: Tables, grant: Grant) -> GrantStanding:
    statement = HAS_ON_COLUMNS if grant.columns else ASK[grant.kind]
    parameters = {
        "privilege": grant.privilege,
        "schema": tables.schema,
        "name": grant.name,
        "columns": list(grant.columns),
    }
    row = tables.connection.execute(statement, parameters).fetchone()
    if row is None:
        return GrantStanding.NO_OBJECT
    return GrantStanding.HELD if row[0] else GrantStanding.MISSING


# What the migrations make; tests/doctor/test_foreign.py compares.
TABLES = (
    "api_answer", "archived_day", "batch", "begun_message", "console_history", "consumer_queue", "dead_letter_audit",
    "failure", "held_message", "inbox_memory", "job", "job_failure", "job_row", "lane_floor", "lane_pause", "message",
    "message_archived", "message_count", "message_discarded", "message_parked", "message_pending",
    "message_quarantined", "message_sent", "message_state", "migration", "node", "operator_audit", "parked_failure",
    "pool", "pool_master", "pool_member", "pool_partition", "processed_message", "processed_message_undated",
    "published", "quarantine", "quarantine_released", "replay", "replay_failure",
)  # fmt: skip
FUNCTIONS = (
    "attached_day(text, date)", "drop_inbox_day(date, boolean)", "drop_sent_day(date, boolean, boolean)",
    "ensure_inbox_days(date, integer)", "ensure_sent_days(date, integer)", "failure_cause(text)",
    "failure_group(text, text, text, text)", "forget_batches(integer, boolean)",
    "forget_failures(integer)", "give_up_batch(text, bigint, text, text)", "guard_batch()", "lock_holders(regclass[])",
    "make_day(text, date)", "note_parked()", "note_released()", "note_retried()",
    "refuse_foreign_batch()", "ring()", "send_edited(bigint, uuid, json, bytea, jsonb, text, text)",
    "sent_day_needed(date, bigint, boolean)",
    "sent(timestamp with time zone, timestamp with time zone)",
)  # fmt: skip
TRIGGERS = (  # each calls the function of its name
    "guard_batch ON batch", "note_parked ON message_parked", "note_released ON quarantine", "note_retried ON failure",
    "refuse_foreign_batch ON batch", "ring ON message",
)  # fmt: skip

# A day that an operator has detached keeps its name, and is no stranger.
READ_FOREIGN = """
    WITH relation AS (
        SELECT oid, relname, relkind FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(%(schema)s))
    ), ours AS (
        SELECT oid, proname FROM pg_proc
        WHERE pronamespace = to_regnamespace(quote_ident(%(schema)s))
            AND proname || '(' || oidvectortypes(proargtypes) || ')' = ANY (%(functions)s)
    ), part (classid, objid, tableid) AS (
        SELECT 'pg_constraint'::regclass, oid, conrelid FROM pg_constraint
        UNION ALL SELECT 'pg_attrdef'::regclass, oid, adrelid FROM pg_attrdef
        UNION ALL SELECT 'pg_class'::regclass, indexrelid, indrelid FROM pg_index
        UNION ALL SELECT 'pg_trigger'::regclass, oid, tgrelid FROM pg_trigger
        UNION ALL SELECT 'pg_class'::regclass, oid, oid FROM relation -- by the key of its partitions
        UNION ALL SELECT 'pg_statistic_ext'::regclass, oid, stxrelid FROM pg_statistic_ext
    )
    SELECT 'table or view ' || relname FROM relation
    WHERE relkind IN ('r', 'p', 'v', 'm', 'f') AND relname <> ALL (%(tables)s)
        AND relname !~ '^(message_sent|processed_message)_[0-9]{8}$'
    UNION ALL
    SELECT 'table ' || relname || ' (an earlier release began to drop this day: DROP TABLE ends that)' FROM relation
    WHERE obj_description(oid, 'pg_class') = 'outbox retention drops this day'
    UNION ALL
    SELECT 'function ' || oid::regprocedure FROM pg_proc
    WHERE pronamespace = to_regnamespace(quote_ident(%(schema)s))
        AND oid NOT IN (SELECT oid FROM ours)
    UNION ALL
    SELECT 'trigger ' || tgname || ' ON ' || relname || ', which calls ' || tgfoid::regprocedure
    FROM pg_trigger JOIN relation ON relation.oid = tgrelid
    WHERE NOT tgisinternal AND (
        tgname || ' ON ' || relname <> ALL (%(triggers)s)
        OR tgfoid NOT IN (SELECT oid FROM ours WHERE proname = tgname)
    )
    UNION ALL -- in a check, a default, an index or a condition; functions of PostgreSQL itself are not noted there
    SELECT DISTINCT pg_describe_object(refclassid, refobjid, 0) || ' in ' || pg_describe_object(classid, objid, 0)
    FROM pg_depend JOIN part USING (classid, objid) JOIN relation ON relation.oid = tableid
    WHERE refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_opclass'::regclass)
        AND (refclassid <> 'pg_proc'::regclass OR refobjid NOT IN (SELECT oid FROM ours))
        AND (classid <> 'pg_trigger'::regclass OR refobjid NOT IN (SELECT tgfoid FROM pg_trigger WHERE oid = objid))
    UNION ALL
    SELECT 'rule ' || rulename || ' ON ' || relname FROM pg_rewrite JOIN relation ON relation.oid = ev_class
    WHERE rulename <> '_RETURN'
    UNION ALL
    SELECT 'policy ' || polname || ' ON ' || relname FROM pg_policy JOIN relation ON relation.oid = polrelid
    UNION ALL
    SELECT 'operator ' || oid::regoperator FROM pg_operator
    WHERE oprnamespace = to_regnamespace(quote_ident(%(schema)s))
    ORDER BY 1
"""

READ_OWNERS = """
    WITH main AS (
        SELECT relowner FROM pg_class WHERE oid = to_regclass(format('%%I.message', %(schema)s::text))
    )
    SELECT pg_get_userbyid(owner)::text, quote_ident(pg_get_userbyid((SELECT relowner FROM main))),
        array_agg(name ORDER BY name), array_agg(part ORDER BY name)
    FROM (
        SELECT relowner AS owner, relname::text AS name,
            format('%%s %%I.%%I', CASE relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, %(schema)s::text, relname) AS part
        FROM pg_class
        WHERE relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND relkind IN ('r', 'p', 'v')
            AND (relname = ANY (%(tables)s) OR relname ~ '^(message_sent|processed_message)_[0-9]{8}$')
        UNION ALL
        SELECT proowner, proname::text,
            format('FUNCTION %%I.%%I(%%s)', %(schema)s::text, proname, oidvectortypes(proargtypes))
        FROM pg_proc
        WHERE pronamespace = to_regnamespace(quote_ident(%(schema)s))
            AND proname || '(' || oidvectortypes(proargtypes) || ')' = ANY (%(functions)s)
    ) AS owned
    WHERE owner <> (SELECT relowner FROM main)
    GROUP BY owner
    ORDER BY 1
"""

READ_CONSUMERS = """
    SELECT rolname::text FROM pg_roles
    WHERE rolcanlogin AND NOT rolsuper
        AND has_table_privilege(oid, to_regclass(format('%%I.processed_message', %(schema)s::text)), 'INSERT')
        AND NOT pg_has_role(oid, (
            SELECT relowner FROM pg_class WHERE oid = to_regclass(format('%%I.message', %(schema)s::text))), 'MEMBER')
    ORDER BY 1
"""
NAMED = 5  # names in a line


def strangers(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name what no migration has made: a trigger runs with the rights of the role that writes."""
    check, schema = "database.foreign", settings.database.schema_name
    parameters = {"schema": schema, "tables": list(TABLES), "functions": list(FUNCTIONS), "triggers": list(TRIGGERS)}
    found = [name for (name,) in connection.execute(READ_FOREIGN, parameters)]
    if found:
        remedy = "look at each: drop it, or move it to another schema"
        yield Finding(check, Verdict.WARNING, f"schema {schema} has what no migration made: {_some(found)}", remedy)
    else:
        yield Finding(check, Verdict.OK, f"schema {schema} has only what the migrations made")


def owners(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each role that owns a part: it may put a trigger on it, or replace what others call."""
    check, schema = "database.owners", settings.database.schema_name
    parameters = {"schema": schema, "tables": list(TABLES), "functions": list(FUNCTIONS)}
    rows = connection.execute(READ_OWNERS, parameters).fetchall()
    for owner, main, names, parts in rows:
        words = f"role {owner} owns {_some(names)}, and can so run code with the rights of every role that uses it"
        remedy = "; ".join(f"ALTER {part} OWNER TO {main}" for part in parts)
        yield Finding(check, Verdict.WARNING, words, remedy)
    if not rows:
        yield Finding(check, Verdict.OK, f"one role owns all tables and functions of schema {schema}")


def shared_inbox(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name the logins that share the inbox: each can read, change and forge what the others hold and remember."""
    check, schema = "database.consumers", settings.database.schema_name
    logins = [name for (name,) in connection.execute(READ_CONSUMERS, {"schema": schema})]
    if len(logins) > 1:
        words = (
            f"{len(logins)} logins share the inbox of schema {schema}, and can forge each other's rows: {_some(logins)}"
        )
        yield Finding(check, Verdict.WARNING, words, "a schema each, unless they trust each other: docs/database.md")
    else:
        yield Finding(check, Verdict.OK, f"{len(logins)} logins may write the inbox of schema {schema}")


def lock_holders(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each session that holds an advisory lock of ours without a right to it."""
    check = "database.locks"
    found = foreign_locks(Tables(connection, settings.database.schema_name))
    for lock in found:
        remedy = f"SELECT pg_terminate_backend({lock.pid}); REVOKE CONNECT ON DATABASE ... FROM PUBLIC"
        yield Finding(check, Verdict.WARNING, str(lock), remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no session holds a lock of the outbox without a right to it")


def writers(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each role whose rows keep rows of another role from being sent."""
    check = "database.writers"
    found = held_up(Tables(connection, settings.database.schema_name))
    for each in found:
        remedy = (
            f'retry or discard the rows of role {each.by}; if it should not write these keys, relay.key_scope = "role"'
        )
        yield Finding(check, Verdict.WARNING, str(each), remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no role's rows wait behind a row of another role")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
