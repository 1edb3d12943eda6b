"""What no migration made, who owns the rest, who shares an inbox, and who holds locks or keys that are not theirs."""

from collections.abc import Iterator

import psycopg

from relay.config.settings import Settings
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.holders import foreign_locks, held_up

# What the migrations make; tests/doctor/test_foreign.py compares.
TABLES = (
    "api_answer", "archived_day", "batch", "begun_message", "consumer_queue", "dead_letter_audit", "failure",
    "held_message", "inbox_memory", "job", "job_failure", "job_row", "lane_floor", "lane_pause", "message",
    "message_archived", "message_count", "message_discarded", "message_parked", "message_pending",
    "message_quarantined", "message_sent", "message_state", "migration", "node", "operator_audit", "parked_failure",
    "pool", "pool_master", "pool_member", "pool_partition", "processed_message", "processed_message_undated",
    "published", "quarantine", "replay", "replay_failure",
)  # fmt: skip
FUNCTIONS = (
    "attached_day(text, date)", "drop_inbox_day(date, boolean)", "drop_sent_day(date, boolean, boolean)",
    "ensure_inbox_days(date, integer)", "ensure_sent_days(date, integer)", "failure_cause(text)",
    "failure_group(text, text, text, text)", "forget_batches(integer, boolean)",
    "forget_failures(integer)", "give_up_batch(text, bigint, text, text)", "guard_batch()", "lock_holders(regclass[])",
    "make_day(text, date)", "note_parked()", "note_retried()",
    "refuse_foreign_batch()", "ring()", "sent_day_needed(date, bigint, boolean)",
    "sent(timestamp with time zone, timestamp with time zone)",
)  # fmt: skip
TRIGGERS = (  # each calls the function of its name
    "guard_batch ON batch", "note_parked ON message_parked", "note_retried ON failure", "refuse_foreign_batch ON batch",
    "ring ON message",
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
TOLD = 5  # names in a line


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
    found = foreign_locks(connection, settings.database.schema_name)
    for lock in found:
        remedy = f"SELECT pg_terminate_backend({lock.pid}); REVOKE CONNECT ON DATABASE ... FROM PUBLIC"
        yield Finding(check, Verdict.WARNING, str(lock), remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no session holds a lock of the outbox without a right to it")


def writers(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each role whose rows keep rows of another role from being sent."""
    check = "database.writers"
    found = held_up(connection, settings.database.schema_name)
    for each in found:
        remedy = (
            f'retry or discard the rows of role {each.by}; if it should not write these keys, relay.key_scope = "role"'
        )
        yield Finding(check, Verdict.WARNING, str(each), remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no role's rows wait behind a row of another role")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return f"{', '.join(names[:TOLD])}{more}"
