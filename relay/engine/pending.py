"""The statements by which the tail reads pending rows."""

from typing import TYPE_CHECKING

from psycopg.sql import SQL

from relay.engine.message import MAX_TRACEPARENT, MAX_TRACESTATE
from relay.outbox.headers import MAX_HEADER_DEPTH

if TYPE_CHECKING:
    from relay.engine.session import LaneSession

# What fits into no message is not read. Headers that relay.outbox takes (64 KiB of JSON) are well below these.
MAX_HEADER_BYTES = 256 * 1024  # of jsonb, uncompressed: twelve for a number of one digit
MAX_HEADER_TEXT_BYTES = 256 * 1024
MAX_HEADER_NUMBERS = 4096
FEW_HEADER_BYTES = 100  # of jsonb: seven numbers at most
SMALL_HEADER_BYTES = 1000  # of jsonb, which become 1.4 MB of text at most
MOST_GROWTH = 6  # times, without the numbers: a control character becomes an escape of six
NUMBER_BYTES = 16_400  # of text: "1.", zeros and a comma
TOO_DEEP = MAX_HEADER_DEPTH + 1  # levels: without a bound, a path into 11,000 levels overflows the server's stack
TRACE_BYTES = 8192
SIZE_SLACK = 8  # the server counts the header of a value, too

DUE_FAR = 86_400_000  # ms: a later row's delay may be too large a number, or infinite

# Bytes of the payload. Both columns are stored uncompressed, so this costs no detoasting; but a writer may have taken a
# compressed value from another table, and what counts is what it becomes.
BODY_SIZE = SQL("""
    CASE WHEN payload_bytes IS NOT NULL THEN octet_length(payload_bytes)
        WHEN pg_column_compression(payload) IS NULL THEN pg_column_size(payload)
        ELSE octet_length(payload::text)
    END
""")

# `least` before it is subtracted: neither an infinite moment nor one in a month has a difference that fits.
COLUMNS = SQL("""
    lane, id, message_id::text AS message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
    content_type, headers, payload, payload_bytes, created_at, attempts,
    CASE WHEN pg_column_size(trace_context) <= {trace_bytes}
            AND jsonb_typeof(trace_context -> 'traceparent') = 'string'
        THEN left(trace_context ->> 'traceparent', {traceparent})
    END AS traceparent,
    CASE WHEN pg_column_size(trace_context) <= {trace_bytes} AND jsonb_typeof(trace_context -> 'tracestate') = 'string'
        THEN left(trace_context ->> 'tracestate', {tracestate})
    END AS tracestate,
    CASE WHEN available_at > now()
        THEN extract(epoch FROM least(available_at, now() + {far} * interval '1 ms') - now()) * 1000
        ELSE 0
    END::integer AS backoff_ms,
    {body_size} AS body_size,
    CASE WHEN headers IS NULL THEN 0
        WHEN pg_column_compression(headers) IS NULL OR pg_column_size(headers) > {header_bytes}
        THEN pg_column_size(headers)
        ELSE pg_column_size(headers || '{{}}')
    END AS header_size
""").format(
    far=DUE_FAR,
    body_size=BODY_SIZE,
    trace_bytes=TRACE_BYTES,
    traceparent=MAX_TRACEPARENT + 1,
    tracestate=MAX_TRACESTATE + 1,
    header_bytes=MAX_HEADER_BYTES,
)

# A few bytes of jsonb may be a gigabyte of text, which ends the statement: numbers are written with all their zeros.
# One beyond what AMQP can carry is looked for in what is large enough to hold several; the others have at most
# 16,383 digits behind the point. `||` gives headers uncompressed: so their size is told before they are written.
SENDABLE = SQL("""
    (header_size <= {few} OR header_size <= {header_bytes}
        AND numbers <= {numbers} AND NOT headers @? 'strict $.**{{{too_deep}}}'
        AND NOT headers @? '$.**{{0 to {too_deep}}} ? (@ > 3.5e38 || @ < -3.5e38)')
""").format(few=FEW_HEADER_BYTES, header_bytes=MAX_HEADER_BYTES, numbers=MAX_HEADER_NUMBERS, too_deep=TOO_DEEP)

# The first row, of lane -1, carries the snapshot in which all the others were seen, how far ids were given, and when
# the first of the delayed rows is due.
# A row that waits out its backoff is read, so that its key is held; one that its writer delayed is not until then.
# What is held already is left out by a hashed subplan.
# `OFFSET 0` keeps the planner from writing headers as text once for each place that names them. Larger headers are
# written only when the row fits into the bytes of its lane, by what they may be at most.
# A row that does not fit is left out: it comes again when there is room. Of what is too large for any message only the
# size is read.
READ = SQL("""
    SELECT -1::smallint, (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq),
        pg_current_snapshot()::text, '', NULL, '', NULL, NULL, NULL, NULL, NULL, NULL, NULL::json, NULL::bytea, now(),
        0::smallint, (
            SELECT ceil(extract(
                epoch FROM greatest(coalesce(min(available_at), now() + {far} * interval '1 ms'), now()) - now()
            ) * 1000)::integer
            FROM {schema}.message
            WHERE state = 'pending' AND available_at < now() + {far} * interval '1 ms'
        ), NULL, 0::bigint, false
    UNION ALL
    SELECT row.lane, id, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type,
        CASE WHEN octet_length(written.headers) <= {text_bytes} THEN written.headers END, traceparent, tracestate,
        CASE WHEN fits AND body_size <= {body_bytes} THEN payload END,
        CASE WHEN fits AND body_size <= {body_bytes} THEN payload_bytes END,
        created_at, attempts, backoff_ms,
        CASE
            WHEN NOT fits
            THEN NULL
            WHEN body_size > {body_bytes}
            THEN body_size || ' bytes are more than max_message_bytes (' || {max_message_bytes} || ')'
            WHEN header_size > {header_bytes}
            THEN 'headers of ' || header_size || ' bytes as jsonb are more than ' || {header_bytes}
            WHEN header_size > 0 AND written.headers IS NULL
            THEN 'headers hold a number that AMQP cannot carry, more than ' || {numbers} || ' numbers or '
                || {max_depth} || ' levels'
            WHEN octet_length(written.headers) > {text_bytes}
            THEN 'headers of ' || octet_length(written.headers) || ' bytes as text are more than ' || {text_bytes}
        END,
        cost, NOT fits
    FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[]) AS owned (lane, floor, bytes)
    CROSS JOIN LATERAL (
        SELECT *, before + cost <= owned.bytes AS fits
        FROM (
            SELECT *, sum(cost) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - cost AS before
            FROM (
                SELECT *, CASE WHEN body_size <= {body_bytes} THEN body_size ELSE 0 END + CASE
                    WHEN header_size <= {small} THEN least(coalesce(octet_length(written_small), 0), {text_bytes})
                    WHEN header_size <= {header_bytes} THEN header_size * {growth} + numbers * {number_bytes}
                    ELSE 0
                END AS cost
                FROM (
                    SELECT *, CASE WHEN header_size <= {small} AND {sendable} THEN headers::text END AS written_small
                    FROM (
                        SELECT *, CASE WHEN header_size > {small} AND header_size <= {header_bytes}
                            THEN jsonb_array_length(jsonb_path_query_array(
                                headers, 'strict $.**{{0 to {too_deep}}} ? (@.type() == "number")'))
                            ELSE 0
                        END AS numbers
                        FROM (
                            SELECT {columns}
                            FROM {schema}.message
                            WHERE state = 'pending' AND lane = owned.lane AND id > owned.floor
                                AND (available_at IS NULL OR available_at <= now() OR attempts > 0)
                                AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
                            ORDER BY id
                            LIMIT %(rows)s
                        ) AS first_rows
                        OFFSET 0
                    ) AS with_numbers
                    OFFSET 0
                ) AS with_text
                OFFSET 0
            ) AS with_cost
        ) AS summed
        WHERE before < owned.bytes
    ) AS row
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN NOT fits THEN NULL
            WHEN header_size <= {small} THEN written_small
            WHEN {sendable} THEN row.headers::text
        END AS headers
        OFFSET 0
    ) AS written
""")


def read_statement(session: "LaneSession", max_message_bytes: int) -> bytes:
    """Write the tail's READ for a schema, and for the largest payload that is read at all."""
    return session.sql(
        READ,
        columns=COLUMNS,
        sendable=SENDABLE,
        far=DUE_FAR,
        small=SMALL_HEADER_BYTES,
        growth=MOST_GROWTH,
        number_bytes=NUMBER_BYTES,
        header_bytes=MAX_HEADER_BYTES,
        numbers=MAX_HEADER_NUMBERS,
        max_depth=MAX_HEADER_DEPTH,
        too_deep=TOO_DEEP,
        text_bytes=MAX_HEADER_TEXT_BYTES,
        max_message_bytes=max_message_bytes,
        body_bytes=max_message_bytes + SIZE_SLACK,
    )


# Rows whose delay is over, or that an operator put back: where to go back to.
DUE = SQL("""
    SELECT lane, min(id)
    FROM {schema}.message
    WHERE state = 'pending' AND available_at <= now() AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
    GROUP BY lane
""")
