"""The statements by which the tail reads pending rows."""

from typing import TYPE_CHECKING

from psycopg.sql import SQL, Identifier

from relay.engine.row import MAX_TRACEPARENT, MAX_TRACESTATE
from relay.outbox.headers import MAX_HEADER_DEPTH

if TYPE_CHECKING:
    from relay.engine.session.session import LaneSession

# What fits into no message is not read. Headers that relay.outbox takes (64 KiB of JSON) are well below these limits.
MAX_HEADER_BYTES = 256 * 1024  # of jsonb, uncompressed
MAX_HEADER_TEXT_BYTES = 256 * 1024
FEW_HEADER_BYTES = 100  # of jsonb: seven numbers at most
MOST_GROWTH = 6  # times, without the decimals: a control character becomes an escape of six
PACKED_COST = 64  # bytes for each one that is stored compressed: it may become 255
MOST_PACKED_COST = 2 * 1024 * 1024  # of headers: more than the share of a lane, and no more than a read of a new window
TOO_DEEP = MAX_HEADER_DEPTH + 1  # levels: without a bound, a path into 11,000 levels overflows the server's stack
TRACE_BYTES = 8192
MOST_OTHER_BYTES = 64 * 1024  # of `writer` and `trace_context` as stored: a mark moves those of thousands of rows
SIZE_SLACK = 8  # the server counts the header of a value, too

DUE_FAR = 86_400_000  # ms: a later row's delay may be too large a number, or infinite

# How many decimals the numbers in `headers` have beyond those that their bytes stand for, of which a number has twelve.
# jsonb keeps 16,383 zeros in them and writes them all. The result is too many where AMQP cannot carry a number (it may
# have 131,072 digits), and NULL where one is nested too deeply. Headers of few bytes and few decimals may be written as
# text; all others may become gigabytes, which ends the statement.
DECIMALS = SQL("""
    CASE WHEN NOT headers @? 'strict $.**{{{too_deep}}}' THEN (
        SELECT coalesce(sum(CASE WHEN abs(number::numeric) <= 3.5e38 THEN greatest(scale(number::numeric) - 31, 0)
            ELSE {too_many} END), 0)
        FROM jsonb_array_elements(
            jsonb_path_query_array(headers, 'strict $.**{{0 to {too_deep}}} ? (@.type() == "number")')
        ) AS number
    ) END
""").format(too_deep=TOO_DEEP, too_many=MAX_HEADER_TEXT_BYTES + 1)

# Whether `headers` of any size may be written as text: a megabyte or two at most.
MAY_BE_WRITTEN = SQL("pg_column_size(headers || '{{}}') <= {header_bytes} AND {decimals} <= {text_bytes}").format(
    header_bytes=MAX_HEADER_BYTES, decimals=DECIMALS, text_bytes=MAX_HEADER_TEXT_BYTES
)

# Bytes of the payload. Both columns are stored uncompressed, so this costs no detoasting. But a writer may have taken a
# compressed value from another table; then its uncompressed size counts.
BODY_SIZE = SQL("""
    CASE WHEN payload_bytes IS NOT NULL THEN octet_length(payload_bytes)
        WHEN pg_column_compression(payload) IS NULL THEN pg_column_size(payload)
        ELSE octet_length(payload::text)
    END
""")

# A row that waits out its backoff is read, so that its key waits. A row that its writer delayed is not read before it
# is due. A hashed subplan leaves out what was read before.
READABLE = SQL("""
    state = 'pending' AND (available_at IS NULL OR available_at <= now() OR attempts > 0)
        AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
""")

# The rows of a lane above its floor.
IN_ORDER = SQL("""
    SELECT * FROM {schema}.message WHERE lane = owned.lane AND id > owned.floor AND {readable}
""")

# The rows of a lane above `after`, and ahead of each the rows of its key, from the lane's floor on. So they are the
# first rows of their keys that this snapshot has. A key has few of a read, or its backlog would keep the others out.
AHEAD = SQL("""
    WITH fresh AS MATERIALIZED (
        SELECT id, aggregate_type, aggregate_id FROM {schema}.message
        WHERE lane = owned.lane AND id > owned.after AND {readable}
        ORDER BY id
        LIMIT %(rows)s
    ), key AS MATERIALIZED (
        SELECT aggregate_type, aggregate_id, max(id) AS last FROM fresh
        WHERE aggregate_id IS NOT NULL
        GROUP BY aggregate_type, aggregate_id
    ), first AS MATERIALIZED (
        SELECT id FROM fresh WHERE aggregate_id IS NULL
        UNION ALL
        SELECT of_key.id FROM key CROSS JOIN LATERAL (
            SELECT id FROM {schema}.message
            WHERE hashtextextended(aggregate_id, 0) = hashtextextended(key.aggregate_id, 0)
                AND aggregate_id = key.aggregate_id AND aggregate_type = key.aggregate_type
                AND id > owned.floor AND id <= key.last AND {readable}
            ORDER BY id
            LIMIT {rows_of_key}
        ) AS of_key
    )
    SELECT message.* FROM first CROSS JOIN LATERAL (
        SELECT * FROM {schema}.message WHERE state = 'pending' AND lane = owned.lane AND id = first.id
        OFFSET 0
    ) AS message
""")
ROWS_OF_KEY = 8

# The first row has lane -1. It carries the snapshot of the read, the highest id that was given until then, and the time
# until the first delayed row is due.
# A row that does not fit into the bytes of its lane is left out, and comes again when there is room. What is stored
# compressed is unpacked only when the rows up to there fit by their stored sizes (`reach`). 60 MB of headers are 240 KB
# in the table, and unpacking the headers of all rows takes longer than a statement may. A row may become larger than it
# was counted (`stored_cost`). Then it is returned only as the first of its lane, with the next rows that still fit.
# Of what is too large for any message, only the size is read.
# Sums are of float8, exact up to 2^53 bytes: a sum of bigint is numeric, which costs 0.3 us a row of the read's 3.5.
# `OFFSET 0` keeps the planner from computing a value once for each place that names it. `least` comes before a moment
# is subtracted: the difference to an infinite one, or to one in a month, does not fit.
READ = SQL("""
    SELECT -1::smallint, (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq),
        pg_current_snapshot()::text, '', NULL, '', NULL, NULL, NULL, NULL, NULL, NULL, NULL::json, NULL::bytea, now(),
        0::smallint, (
            SELECT ceil(extract(
                epoch FROM greatest(coalesce(min(available_at), now() + {far} * interval '1 ms'), now()) - now()
            ) * 1000)::integer
            FROM {schema}.message
            WHERE state = 'pending' AND available_at < now() + {far} * interval '1 ms'
        ), NULL, 0::bigint, false, NULL, ''
    UNION ALL
    SELECT row.lane, id, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type,
        CASE WHEN octet_length(written.headers) <= {text_bytes} THEN written.headers END,
        CASE WHEN fits AND pg_column_size(trace_context) <= {trace_bytes}
                AND jsonb_typeof(trace_context -> 'traceparent') = 'string'
            THEN left(trace_context ->> 'traceparent', {traceparent})
        END,
        CASE WHEN fits AND pg_column_size(trace_context) <= {trace_bytes}
                AND jsonb_typeof(trace_context -> 'tracestate') = 'string'
            THEN left(trace_context ->> 'tracestate', {tracestate})
        END,
        CASE WHEN fits AND body_size <= {body_bytes} THEN payload END,
        CASE WHEN fits AND body_size <= {body_bytes} THEN payload_bytes END,
        created_at, attempts, backoff_ms,
        CASE
            WHEN NOT fits
            THEN NULL
            WHEN body_size > {body_bytes}
            THEN body_size || ' bytes are more than max_message_bytes (' || {max_message_bytes} || ')'
            WHEN stored_others > {most_others}
            THEN 'writer and trace_context of ' || stored_others || ' bytes are more than ' || {most_others}
            WHEN header_size > {header_bytes}
            THEN 'headers of ' || header_size || ' bytes as jsonb are more than ' || {header_bytes}
            WHEN header_size > 0 AND written.headers IS NULL
            THEN 'headers hold a number that AMQP cannot carry, more than ' || {text_bytes} || ' decimals or '
                || {max_depth} || ' levels'
            WHEN octet_length(written.headers) > {text_bytes}
            THEN 'headers of ' || octet_length(written.headers) || ' bytes as text are more than ' || {text_bytes}
        END,
        CASE WHEN fits THEN greatest(cost, stored_body::bigint + stored_headers + stored_others) ELSE cost END,
        NOT fits, key_role, written_as
    FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[], %(after)s::bigint[])
        AS owned (lane, floor, bytes, after)
    CROSS JOIN LATERAL (
        SELECT *, reach <= owned.bytes AND (cost <= stored_cost OR reach = stored_cost)
            AND sum(cost::float8) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) <= owned.bytes AS fits
        FROM (
            SELECT *, greatest(
                stored_cost,
                CASE WHEN body_size <= {body_bytes} THEN body_size ELSE 0 END
                    + CASE WHEN decimals <= {text_bytes} THEN least(header_size * {growth} + decimals, {text_bytes})
                        ELSE 0 END
            ) AS cost
            FROM (
                SELECT *, CASE
                    WHEN reach > owned.bytes OR header_size NOT BETWEEN 1 AND {header_bytes} THEN NULL
                    WHEN header_size <= {few} THEN greatest(octet_length(headers::text) - header_size * {growth}, 0)
                    ELSE {decimals}
                END AS decimals
                FROM (
                    SELECT *, sum(stored_cost::float8) OVER reading AS reach,
                        CASE WHEN sum(stored_cost::float8) OVER reading <= owned.bytes AND stored_body <= {body_bytes}
                            THEN {body_size} ELSE stored_body END AS body_size,
                        CASE WHEN sum(stored_cost::float8) OVER reading <= owned.bytes
                                AND stored_headers <= {header_bytes} AND pg_column_compression(headers) IS NOT NULL
                            THEN pg_column_size(headers || '{{}}') ELSE stored_headers END AS header_size
                    FROM (
                        SELECT lane, id, message_id::text AS message_id, aggregate_type, aggregate_id, event_type,
                            exchange, routing_key, content_type, headers, trace_context, payload, payload_bytes,
                            created_at, attempts, {key_role} AS key_role, written_as,
                            CASE WHEN available_at > now()
                                THEN extract(epoch FROM
                                    least(available_at, now() + {far} * interval '1 ms') - now()) * 1000
                                ELSE 0
                            END::integer AS backoff_ms,
                            coalesce(octet_length(payload_bytes), pg_column_size(payload)) AS stored_body,
                            coalesce(pg_column_size(headers), 0) AS stored_headers,
                            coalesce(pg_column_size(writer), 0) + coalesce(pg_column_size(trace_context), 0)
                                AS stored_others,
                            CASE
                                WHEN coalesce(octet_length(payload_bytes), pg_column_size(payload)) > {body_bytes}
                                THEN 0
                                WHEN payload_bytes IS NOT NULL
                                THEN octet_length(payload_bytes)
                                WHEN pg_column_compression(payload) IS NULL
                                THEN pg_column_size(payload)
                                ELSE pg_column_size(payload)::bigint * {packed}
                            END + CASE
                                WHEN headers IS NULL OR pg_column_size(headers) > {header_bytes}
                                THEN 0
                                WHEN pg_column_compression(headers) IS NULL
                                THEN least(pg_column_size(headers) * {growth}, {text_bytes})
                                ELSE least(pg_column_size(headers) * {packed}, {most_packed})
                            END + CASE
                                WHEN pg_column_compression(trace_context) IS NULL
                                    OR pg_column_size(trace_context) > {trace_bytes}
                                THEN 0
                                ELSE pg_column_size(trace_context) * {packed}
                            END AS stored_cost
                        FROM ({source}) AS message
                        ORDER BY id
                        LIMIT %(rows)s
                    ) AS first_rows
                    WINDOW reading AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
                ) AS with_sizes
                WHERE reach - stored_cost <= owned.bytes
                OFFSET 0
            ) AS with_decimals
        ) AS with_cost
        OFFSET 0
    ) AS row
    CROSS JOIN LATERAL (
        SELECT CASE WHEN fits AND decimals <= {text_bytes} THEN row.headers::text END AS headers
        OFFSET 0
    ) AS written
""")


def read_statement(session: "LaneSession", max_message_bytes: int, source: SQL = IN_ORDER) -> bytes:
    """Return the tail's READ for the session's schema; of a larger payload only the size is read.

    Args:
        source: the rows of a lane, `IN_ORDER` or `AHEAD`.
    """
    schema = Identifier(session.schema)
    return session.sql(
        READ,
        source=source.format(schema=schema, readable=READABLE, rows_of_key=ROWS_OF_KEY),
        body_size=BODY_SIZE,
        decimals=DECIMALS,
        far=DUE_FAR,
        few=FEW_HEADER_BYTES,
        growth=MOST_GROWTH,
        packed=PACKED_COST,
        most_packed=MOST_PACKED_COST,
        header_bytes=MAX_HEADER_BYTES,
        max_depth=MAX_HEADER_DEPTH,
        text_bytes=MAX_HEADER_TEXT_BYTES,
        trace_bytes=TRACE_BYTES,
        most_others=MOST_OTHER_BYTES,
        traceparent=MAX_TRACEPARENT + 1,
        tracestate=MAX_TRACESTATE + 1,
        max_message_bytes=max_message_bytes,
        body_bytes=max_message_bytes + SIZE_SLACK,
    )


# Lanes with more rows above `after` than these.
CROWDED = SQL("""
    SELECT lane FROM unnest(%(lanes)s::smallint[], %(after)s::bigint[]) AS owned (lane, after)
    WHERE EXISTS (
        SELECT FROM {schema}.message
        WHERE state = 'pending' AND message.lane = owned.lane AND id > owned.after
        ORDER BY id
        OFFSET %(most)s
    )
""")

# Rows whose delay is over, or that an operator put back: by lane, the id from which to read again.
DUE = SQL("""
    SELECT lane, min(id)
    FROM {schema}.message
    WHERE state = 'pending' AND available_at <= now() AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    GROUP BY lane
""")
