"""The outbox tables: are they there, with the days that come next?"""

from collections.abc import Iterator

import psycopg
from psycopg.sql import SQL, Identifier

from relay.config.settings import Settings
from relay.engine.read.floors import IDENTIFY
from relay.engine.session.session import LANES
from relay.operate.batches import IS_UNFINISHED
from relay.operate.doctor.finding import Finding, Verdict
from relay.servers.postgres.compatibility import READ_TABLES, TABLES_MISSING, head_revision, release_needed
from relay.servers.postgres.database import one

DAYS_AHEAD = 3  # today (UTC) and the next two, as the relay makes them (`database_retry.ENSURE_DAYS`)

# Floors are saved at a position that was given: a sequence below it was set back. A relay that lives says so itself.
READ_HISTORY = SQL("""
    SELECT (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq),
        (SELECT max(watermark) FROM {schema}.lane_floor WHERE saved_in = ({identify})),
        (SELECT min(reason) FROM {schema}.node, unnest(reasons) AS reason WHERE starts_with(reason, 'history: '))
""")

# The sequences that give a column of ours its values. What this login may not read is left out.
READ_SEQUENCES = """
    SELECT sequence.relname, part.relname, attname
    FROM pg_class AS sequence
    JOIN pg_namespace ON pg_namespace.oid = sequence.relnamespace
    JOIN pg_depend ON pg_depend.objid = sequence.oid AND classid = 'pg_class'::regclass AND deptype IN ('a', 'i')
    JOIN pg_class AS part ON part.oid = refobjid
    JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
    WHERE nspname = %(schema)s
        AND CASE sequence.relkind WHEN 'S' THEN has_sequence_privilege(sequence.oid, 'SELECT') ELSE false END
        AND has_column_privilege(refobjid, attnum, 'SELECT')
    ORDER BY sequence.relname
"""

# Ids of sent rows have no index: of each of the last days, any rows show that ids were given. What is saved in another
# database shows it exactly, with the ids whose transaction was rolled back. The snapshot is older than the look at the
# sequence: no id that is given meanwhile is above.
READ_HIGHEST_MESSAGE = SQL("""
    SELECT highest, (SELECT last_value - (NOT is_called)::integer FROM {sequence})
    FROM (
        SELECT max(id) FROM (
            SELECT last.id FROM generate_series(0, {lanes} - 1) AS each, LATERAL (
                SELECT id FROM {schema}.message WHERE state = 'pending' AND lane = each ORDER BY id DESC LIMIT 1
            ) AS last
            UNION ALL SELECT max(id) FROM {schema}.message WHERE state = 'parked'
            UNION ALL SELECT max(id) FROM {schema}.message WHERE state = 'quarantined'
            UNION ALL SELECT max(id) FROM {schema}.message WHERE state = 'discarded'
            UNION ALL SELECT max(id) FROM {schema}.message WHERE state = 'archived'
            UNION ALL SELECT sample.id FROM generate_series(0, {days} - 1) AS each, LATERAL (
                SELECT id FROM {schema}.message
                WHERE state = 'sent' AND sent_at >= date_trunc('day', now(), 'UTC') - each * interval '1 day'
                    AND sent_at < date_trunc('day', now(), 'UTC') - (each - 1) * interval '1 day'
                LIMIT 1000
            ) AS sample
            UNION ALL SELECT max(watermark) FROM {schema}.lane_floor WHERE saved_in <> ({identify})
        ) AS found
    ) AS rows (highest)
""")
SENT_DAYS = 7
READ_HIGHEST = SQL("""
    SELECT highest, (SELECT last_value - (NOT is_called)::integer FROM {sequence})
    FROM (SELECT max({column}) FROM {schema}.{table}) AS rows (highest)
""")

# A day is there when its partition is attached; a table that only has the name keeps it from being made.
READ_DAYS = SQL("""
    SELECT part.name, part.oid IS NOT NULL, pg_inherits.inhrelid IS NOT NULL
    FROM generate_series(0, %(days)s - 1) AS day
    CROSS JOIN LATERAL (
        SELECT 'message_sent_' || to_char((now() AT TIME ZONE 'UTC')::date + day, 'YYYYMMDD') AS name
    ) AS wanted
    CROSS JOIN LATERAL (
        SELECT wanted.name, to_regclass(format('%%I.%%I', %(schema)s::text, wanted.name))::oid AS oid
    ) AS part
    LEFT JOIN pg_inherits
        ON pg_inherits.inhrelid = part.oid AND inhparent = to_regclass(format('%%I.message_sent', %(schema)s::text))
    ORDER BY day
""")

IDLE_LONG = 3600  # seconds, as in the alert OutboxBatchUnfinished: a job that runs writes pieces
READ_UNFINISHED = SQL("""
    SELECT app_id, version, partitions, pieces, idle
    FROM {schema}.batch
    CROSS JOIN LATERAL (
        SELECT count(*) AS pieces,
            extract(epoch FROM now() - greatest(batch.committed_at, max(piece.committed_at))) AS idle
        FROM {schema}.batch AS piece
        WHERE piece.app_id = batch.app_id AND piece.version = batch.version AND piece.partition >= 0
    ) AS written
    WHERE idle > {long} AND {is_unfinished}
    ORDER BY idle DESC
    LIMIT 10
""")

# PostgreSQL refuses to update or delete a row that a publication of updates or deletes covers, if the table has no
# replica identity. From release 18 on, that must have no generated column which the publication leaves out
# (`pubgencols`, which older servers lack). Rows of a sent day only come and go with it.
READ_PUBLICATIONS = """
    WITH part AS (
        SELECT pg_class.oid, relnamespace, relreplident, format('%%I.%%I', nspname, relname) AS name
        FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE nspname = %(schema)s AND relkind = 'r' AND relname !~ '^message_sent_[0-9]{8}$'
            AND pg_relation_is_publishable(pg_class.oid)
    ), unique_key AS (
        SELECT indrelid, quote_ident(index.relname) AS name, bool_or(attgenerated <> '') AS is_generated,
            indisprimary AND part.relreplident = 'd' OR indisreplident AND part.relreplident = 'i' AS is_identity
        FROM pg_index
        JOIN part ON part.oid = indrelid
        JOIN pg_class AS index ON index.oid = indexrelid
        JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey[0:indnkeyatts - 1])
        WHERE indisunique AND indimmediate AND indisvalid AND indpred IS NULL AND indexprs IS NULL
        GROUP BY indexrelid, indrelid, index.relname, indisprimary, indisreplident, part.relreplident
        HAVING bool_and(attnotnull)
    ), covered AS (
        SELECT pubname, part.name, CASE relreplident WHEN 'f' THEN true ELSE identity.name IS NOT NULL END AS is_known,
            leaves_out AND coalesce(identity.is_generated, best.is_generated, has_generated) AS is_left_out,
            coalesce('USING INDEX ' || best.name, 'FULL') AS best
        FROM pg_publication
        CROSS JOIN part
        CROSS JOIN LATERAL (
            SELECT to_jsonb(pg_publication) ->> 'pubgencols' IS NOT DISTINCT FROM 'n'
        ) AS how (leaves_out)
        CROSS JOIN LATERAL (
            SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = part.oid AND attgenerated <> '')
        ) AS columns (has_generated)
        LEFT JOIN unique_key AS identity ON identity.indrelid = part.oid AND is_identity
        LEFT JOIN LATERAL (
            SELECT name, is_generated FROM unique_key
            WHERE indrelid = part.oid AND relreplident <> 'f' ORDER BY is_generated, name LIMIT 1
        ) AS best ON true
        WHERE (pubupdate OR pubdelete) AND (
            puballtables
            OR EXISTS (
                SELECT FROM pg_publication_namespace WHERE pnpubid = pg_publication.oid AND pnnspid = relnamespace
            )
            OR EXISTS (
                SELECT FROM pg_publication_rel
                WHERE prpubid = pg_publication.oid
                    AND (prrelid = part.oid OR prrelid IN (SELECT relid FROM pg_partition_ancestors(part.oid)))
            )
        )
    )
    SELECT quote_ident(pubname), count(*),
        array_agg(name ORDER BY name) FILTER (WHERE NOT is_known OR is_left_out),
        coalesce(array_agg(format('ALTER TABLE %%s REPLICA IDENTITY %%s', name, best) ORDER BY name)
            FILTER (WHERE NOT is_known), '{}'),
        bool_or(is_left_out)
    FROM covered
    GROUP BY pubname
    ORDER BY pubname
"""

READ_SUBSCRIPTIONS = """
    SELECT quote_ident(subname), count(*)
    FROM pg_subscription
    JOIN pg_subscription_rel ON srsubid = pg_subscription.oid
    JOIN pg_class ON pg_class.oid = srrelid
    JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = %(schema)s AND starts_with(relname, 'message')
    GROUP BY subname
    ORDER BY subname
"""


def tables_at_head(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    check, schema, wanted = "database.tables", settings.database.schema_name, head_revision()
    try:
        row = connection.execute(READ_TABLES.format(schema=Identifier(schema))).fetchone()
    except TABLES_MISSING:
        row = None
    found, note = row or ("none", None)
    words = f"schema {schema} is of version {found}; this release needs {wanted}"
    if needed := release_needed(note):
        yield Finding(check, Verdict.FAILED, f"{words}, and they need release {needed}", f"run release {needed}")
    elif row and found >= wanted:  # a newer one is served: a migration runs before the relays are replaced
        yield Finding(check, Verdict.OK, words)
    else:
        yield Finding(check, Verdict.FAILED, words, "run `relay migrate`, or check database.schema")


def days_ahead(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """What is sent is marked by moving it to its day."""
    check = "database.days"
    parameters = {"schema": settings.database.schema_name, "days": DAYS_AHEAD}
    days = connection.execute(READ_DAYS, parameters).fetchall()
    in_the_way = [name for name, exists, is_attached in days if exists and not is_attached]
    missing = [name for name, exists, _ in days if not exists]
    if in_the_way:
        words = f"{', '.join(in_the_way)} is no partition of message_sent: that day can neither be made nor marked"
        yield Finding(check, Verdict.FAILED, words, "rename or drop that table")
    if missing:
        words = f"no partition {', '.join(missing)}; a relay makes them when it starts, and each hour"
        yield Finding(check, Verdict.WARNING, words, "if a relay runs, see its event days.blocked")
    if not in_the_way and not missing:
        yield Finding(check, Verdict.OK, f"today's partition and those of the next {DAYS_AHEAD - 1} days are there")


def history(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    check = "database.history"
    statement = READ_HISTORY.format(schema=Identifier(settings.database.schema_name), identify=IDENTIFY)
    given, saved, noted = one(connection.execute(statement).fetchone())
    remedy = "compare with `relay reconcile` what consumers have applied (docs/backup.md)"
    if noted:
        yield Finding(check, Verdict.FAILED, str(noted).removeprefix("history: ").partition(":")[0], remedy)
    elif saved is not None and saved > given:
        yield Finding(check, Verdict.FAILED, f"the database went back from message {saved} to {given}", remedy)
    else:
        yield Finding(check, Verdict.OK, "no fewer messages were written than relays have seen")


def sequences(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each sequence that would give an id again: logical replication copies rows, and sets no sequence."""
    check, schema = "database.sequences", settings.database.schema_name
    behind = False
    for name, table, column in connection.execute(READ_SEQUENCES, {"schema": schema}).fetchall():
        read = READ_HIGHEST_MESSAGE if table == "message" else READ_HIGHEST
        statement = read.format(
            schema=Identifier(schema),
            sequence=Identifier(schema, name),
            table=Identifier(table),
            column=Identifier(column),
            identify=IDENTIFY,
            lanes=LANES,
            days=SENT_DAYS,
        )
        highest, given = one(connection.execute(statement).fetchone())
        if highest is not None and highest > given:
            behind = True
            words = f"the sequence is below the highest id: {schema}.{name} has given {given}, {table} has {highest}"
            setval = SQL("SELECT setval({}, {})").format(Identifier(schema, name).as_string(), highest).as_string()
            yield Finding(check, Verdict.FAILED, words, f"end applications and relays, then: {setval}")
    if not behind:
        yield Finding(check, Verdict.OK, "no sequence is below the highest id")


def subscriptions(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each subscription that writes rows here which another server's relay sends, too."""
    check, schema = "database.subscriptions", settings.database.schema_name
    found = connection.execute(READ_SUBSCRIPTIONS, {"schema": schema}).fetchall()
    for name, number in found:
        words = f"subscription {name} writes into {number} tables of messages, which another server's relay sends"
        remedy = f"run no relay here before the cut-over (docs/blue-green.md); after it: DROP SUBSCRIPTION {name}"
        yield Finding(check, Verdict.FAILED, words, remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no subscription writes messages")


def unfinished_batches(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each batch of Spark of which some pieces are written, and no more are."""
    check, schema = "database.batches", Identifier(settings.database.schema_name)
    unfinished = SQL(IS_UNFINISHED).format(schema=schema)
    statement = READ_UNFINISHED.format(schema=schema, is_unfinished=unfinished, long=IDLE_LONG)
    found = connection.execute(statement).fetchall()
    for app_id, version, partitions, pieces, idle in found:
        words = (
            f"batch {app_id!r} version {version} has {pieces} of its {partitions} pieces, and no new one for"
            f" {idle / 3600:.0f} h"
        )
        remedy = "run its job again; if that cannot be, `relay batches give-up`"
        yield Finding(check, Verdict.WARNING, words, remedy)
    if not found:
        yield Finding(check, Verdict.OK, "no batch of Spark was begun and left")


def publications(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Name each publication of our tables, and whether it keeps rows from being marked."""
    check, schema = "database.publications", settings.database.schema_name
    found = connection.execute(READ_PUBLICATIONS, {"schema": schema}).fetchall()
    for name, number, refused, repairs, is_left_out in found:
        if refused:
            # On a subscriber, a generated column of the same name must become a plain one.
            if is_left_out:
                repairs.append(f"ALTER PUBLICATION {name} SET (publish_generated_columns = stored)")
            words = f"publication {name} has changes of {', '.join(refused)}, which have no usable replica identity:"
            remedy = f"drop the publication, leave schema {schema} out of it, or: {'; '.join(repairs)}"
            yield Finding(check, Verdict.FAILED, f"{words} no row there can be marked", remedy)
        else:
            words = f"publication {name} has changes of {number} tables of the outbox; each has a replica identity"
            yield Finding(check, Verdict.OK, words)
    if not found:
        yield Finding(check, Verdict.OK, "no publication has changes of the outbox")
