"""The statements by which the tail reads rows that are not sent: pending ones, and those of the log."""

from collections.abc import Sequence

from psycopg.sql import SQL, Composable, Identifier

from relay.engine.row import MAX_TRACEPARENT, MAX_TRACESTATE
from relay.engine.session.segments import HIGHEST, Segment
from relay.engine.session.session import LaneSession
from relay.outbox.headers import MAX_HEADER_DEPTH

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

COLUMNS = SQL("""
    lane, id, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type, headers,
    trace_context, payload, payload_bytes, created_at, attempts, available_at, writer
""")

OWNED = SQL("""
    unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[]) AS owned (lane, floor, bytes)
""")

# A row that waits out its backoff is read, so that its key is held. A row that its writer delayed is not read before it
# is due. A hashed subplan leaves out what is held already.
PENDING = SQL("""
    SELECT {columns}, false AS is_logged
    FROM {schema}.message
    WHERE state = 'pending' AND lane = owned.lane AND id > owned.floor{within}
        AND (available_at IS NULL OR available_at <= now() OR attempts > 0)
        AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    ORDER BY id
    LIMIT %(rows)s
""")

# `OFFSET 0`: the array is made once, not for each row.
# `last` is the highest id to read. A pending row must not come before a row of the log that is not read yet. But its
# writer may have named any id, so pending rows have no bound if no row of the log can be above `last`.
OWNED_OF_LOG = SQL("""
    (
        SELECT lane, floor, bytes, low, read_to, last, seen_to, unseen::bigint[] AS unseen,
            CASE WHEN last < (SELECT last_value FROM {schema}.message_id_seq) THEN last ELSE {highest} END AS pending_to
        FROM unnest(
            %(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[], %(lows)s::bigint[],
            %(read_to)s::bigint[], %(ends)s::bigint[], %(seen_to)s::bigint[], %(unseen)s::text[]
        ) AS given (lane, floor, bytes, low, read_to, last, seen_to, unseen)
        OFFSET 0
    ) AS owned
""")

# Each branch is in order, so all rows come in order without a sort, and only as many are read as are needed.
# The rows of the log begin at `low`; those at or below `read_to` were read if the snapshot could see them.
MERGED = SQL("""
    SELECT * FROM ({branches}) AS branch ORDER BY id LIMIT %(rows)s
""")
LOGGED = SQL("""
    SELECT {columns}, true AS is_logged
    FROM {schema}.{table} AS stored
    WHERE lane = owned.lane AND id > owned.low AND id <= owned.last AND (
        id > owned.read_to
        OR (xid >= owned.seen_to OR xid = ANY (owned.unseen)) AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    ){unsent}
    ORDER BY id
    LIMIT %(rows)s
""")

# For the first reads of a session: what an earlier one may have sent since its checkpoint. One hash of all ids above
# the floor; the estimate for an array of unknown size makes the planner choose it. Few rows are below a floor. They
# look for their receipt by block, or the hash would hold every id since the oldest transaction began.
UNSENT = SQL("""
        AND CASE WHEN id > owned.read_to
            THEN id NOT IN (SELECT unnest(ARRAY(
                SELECT unnest(ids) FROM {schema}.receipt
                WHERE block >= (%(checked)s::bigint[])[1] AND block <= (%(checked)s::bigint[])[2]
            )))
            ELSE NOT EXISTS (
                SELECT FROM {schema}.receipt WHERE block = stored.id >> 12 AND stored.id = ANY (ids)
            )
        END
""")

# The first row has lane -1. It carries the snapshot of the read, and the highest id that was given until then. It also
# has the time until the first delayed row is due, and the end of the last segment of the log.
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
        ), NULL, (SELECT coalesce(max(past), 0) FROM {schema}.segment), false, false
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
        NOT fits, is_logged
    FROM {owned}
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
                            created_at, attempts, is_logged,
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
                        FROM ({rows}) AS stored
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


def read_statement(
    session: LaneSession, max_message_bytes: int, segments: Sequence[Segment] = (), *, is_checked: bool = False
) -> bytes:
    """Return the tail's READ for the session's schema; of a larger payload only the size is read.

    Args:
        segments: the tables of the log to read next to the table of pending rows.
        is_checked: whether to leave out the rows that receipts name.
    """
    schema = Identifier(session.schema)
    within = SQL(" AND id <= owned.pending_to" if segments else "")
    rows = PENDING.format(schema=schema, columns=COLUMNS, within=within)
    if segments:
        unsent = UNSENT.format(schema=schema) if is_checked else SQL("")
        branches: list[Composable] = [rows]
        for segment in segments:
            table = Identifier(segment.table)
            branches.append(LOGGED.format(schema=schema, table=table, columns=COLUMNS, unsent=unsent))
        rows = MERGED.format(branches=SQL(" UNION ALL ").join(SQL("({})").format(branch) for branch in branches))
    return session.sql(
        READ,
        owned=OWNED_OF_LOG.format(schema=schema, highest=HIGHEST) if segments else OWNED,
        rows=rows,
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


# Rows whose delay is over, or that an operator put back: by lane, the id from which to read again.
DUE = SQL("""
    SELECT lane, min(id)
    FROM {schema}.message
    WHERE state = 'pending' AND available_at <= now() AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    GROUP BY lane
""")
