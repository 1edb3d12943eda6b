"""The statements by which the tail reads pending rows."""

from psycopg.sql import SQL

from relay.engine.row import Row

DUE_FAR = 86_400_000  # ms: a later row's delay may be too large a number, or infinite

# `least` before it is subtracted: neither an infinite moment nor one in a month has a difference that fits.
COLUMNS = SQL("""
    lane, id, message_id::text AS message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
    content_type, headers::text AS headers, trace_context::text AS trace_context, payload, payload_bytes, created_at,
    attempts, CASE WHEN available_at > now()
        THEN extract(epoch FROM least(available_at, now() + {far} * interval '1 ms') - now()) * 1000
        ELSE 0
    END::integer AS backoff_ms
""").format(far=DUE_FAR)

# The payload of a row goes over only if it fits into what its lane may bring, and is no larger than a message may be.
# In its place `left_out` has its size: the row comes again when there is room, or is refused without being read.
CHOSEN = {
    "payload": SQL("CASE WHEN row.is_read THEN row.payload END"),
    "payload_bytes": SQL("CASE WHEN row.is_read THEN row.payload_bytes END"),
    "left_out": SQL("CASE WHEN row.is_read THEN 0 ELSE row.size END"),
}
FIELDS = SQL(", ").join(CHOSEN.get(name, SQL("row.") + SQL(name)) for name in Row._fields)

# The first row, of lane -1, carries the snapshot in which all the others were seen, how far ids were given, and when
# the first of the delayed rows is due.
# A row that waits out its backoff is read, so that its key is held; one that its writer delayed is not until then.
# What is held already is left out by a hashed subplan; `size` of a column stored uncompressed costs no detoasting.
READ = SQL("""
    SELECT -1::smallint, (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq),
        pg_current_snapshot()::text, '', NULL, '', NULL, NULL, NULL, NULL, NULL, NULL::json, NULL::bytea, now(),
        0::smallint, (
            SELECT ceil(extract(
                epoch FROM greatest(coalesce(min(available_at), now() + {far} * interval '1 ms'), now()) - now()
            ) * 1000)::integer
            FROM {schema}.message
            WHERE state = 'pending' AND available_at < now() + {far} * interval '1 ms'
        ), 0
    UNION ALL
    SELECT {fields}
    FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[]) AS owned (lane, floor, bytes)
    CROSS JOIN LATERAL (
        SELECT *, size <= %(largest)s AND before + size <= owned.bytes AS is_read
        FROM (
            SELECT *, coalesce(
                sum(size) FILTER (WHERE size <= %(largest)s)
                    OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0
            ) AS before
            FROM (
                SELECT {columns}, coalesce(pg_column_size(payload), pg_column_size(payload_bytes)) AS size
                FROM {schema}.message
                WHERE state = 'pending' AND lane = owned.lane AND id > owned.floor
                    AND (available_at IS NULL OR available_at <= now() OR attempts > 0)
                    AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
                ORDER BY id
                LIMIT %(rows)s
            ) AS first_rows
        ) AS summed_rows
        WHERE before < owned.bytes
    ) AS row
""")

# Rows whose delay is over, or that an operator put back: where to go back to.
DUE = SQL("""
    SELECT lane, min(id)
    FROM {schema}.message
    WHERE state = 'pending' AND available_at <= now() AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    GROUP BY lane
""")
