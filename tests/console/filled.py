"""An outbox in which every page has something to show."""

from tests.console.rows import AGE, sent
from tests.operate.rows import Rows

LONG = "x" * 200 + "<img src=x onerror=alert(1)>"  # it has no blank to break at, and may not become a tag

STATEMENTS = """
    INSERT INTO outbox.job (kind, source, made_by, why, filter, state, selected, done, failed, stages,
        stop_when_failing, rate, paused_because, by_console)
    VALUES ('retry', 'parked', 'ada', 'mended', '{"event_type": "Paid"}', 'paused', 110, 11, 1, '{1,10,100}', 0.05,
            100, '1 of 10 rows of the stage failed again', true),
        ('replay', 'sent', 'ada', NULL, '{"aggregate_id": "7"}', 'done', 5, 5, 0, NULL, NULL, NULL, NULL, true),
        ('discard', 'parked', 'ada', 'test data', '{}', 'done', 1, 1, 0, NULL, NULL, NULL, NULL, true);
    INSERT INTO outbox.job_failure (job_id, id, message_id, reason)
    SELECT job.id, row.id, row.message_id, 'refused again'
    FROM outbox.job, LATERAL (SELECT * FROM outbox.message WHERE state = job.source ORDER BY id LIMIT 1) AS row;
    INSERT INTO outbox.operator_audit (done_by, command, target, why, job)
    VALUES ('ada', 'parked retry', '1', 'mended', 1), ('ada', 'message reveal', '2', NULL, NULL);
    INSERT INTO outbox.dead_letter_audit (done_by, command, why, queue, message_id)
    VALUES ('ada', 'discard', 'a test', 'billing.dead', gen_random_uuid());
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)
    VALUES ('invoices', 7, -1, 1, gen_random_uuid(),
            '{"rows": 5, "table": "billing.invoice", "messages": 5, "seconds": 3, "repeats": 1}'),
        ('invoices', 8, -2, 4, gen_random_uuid(), '{}');
    INSERT INTO outbox.archived_day (day, rows, checksum, path) VALUES (current_date - 50, 9, 1, 's3a://archive/outbox');
    SELECT outbox.make_day('message_sent', current_date - 40);
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT 'billing', message_id, (created_at AT TIME ZONE 'UTC')::date FROM outbox.message
    WHERE state = 'sent' ORDER BY id OFFSET 2;
    INSERT INTO outbox.held_message (consumer_name, key, message_id, event_type, exchange, routing_key, envelope, body,
        attempts, first_failed_at, last_failed_at, due_at, exception, error)
    VALUES ('billing', 'customer/7', gen_random_uuid(), 'Paid', 'outbox', 'paid', '', '', 3, now(), now(), now(),
        'ValueError', 'no such customer');
    INSERT INTO outbox.pool VALUES ('billing', 'billing', 15);
    INSERT INTO outbox.pool_member (pool, name, checked_in_at, leaving, unacknowledged)
    VALUES ('billing', 'a', now(), false, 7), ('billing', 'b', now(), true, 0), ('billing', 'c', now() - interval '1 h',
        false, 0);
    INSERT INTO outbox.pool_partition (pool, partition, epoch, member, wanted_by, taken_from)
    VALUES ('billing', 0, 3, 'a', NULL, NULL), ('billing', 1, 4, 'a', 'b', NULL), ('billing', 2, 5, NULL, NULL, 'c');
    INSERT INTO outbox.console_history (at, backlog, age_s, rate, in_queues, parked, latency_s, sent)
    SELECT now() - ago * interval '1 second', 4, 2.5, 3, 1, 2, 0.2,
        format('{"routes": [["outbox", "Paid", 2]], "types": [["Paid", 2], ["%s<b>", 1]]}', repeat('x', 200))::jsonb
    FROM generate_series(600, 1200, 10) AS ago;
    INSERT INTO outbox.pool_master (name, backend_pid) VALUES ('a', 1)
"""


def fill(url: str) -> list[str]:
    """Fill an outbox; return the addresses of messages that wait, of jobs, and of a restore."""
    sent(url, 60)
    rows = Rows(url)
    with rows.connection as connection:
        head = rows.parked("1", event_type="Paid")
        rows.parked("1", behind=head)
        long = rows.parked("2", aggregate_type=LONG, headers="{}")
        connection.execute("UPDATE outbox.message SET last_error = %s WHERE id = %s", [LONG, long])
        discarded = rows.parked("4")
        connection.execute("UPDATE outbox.message SET state = 'discarded' WHERE id = %s", [discarded])
        waiting = [rows.quarantined("nowhere"), rows.pending("3")]
        rows.node("relay-1", in_flight=3, published_total=1_234)
        rows.node("relay-2", lanes=[], state="degraded", reasons=["the broker blocks publishing"])
        rows.node("relay-3", lanes=[], age=600)
        connection.execute(STATEMENTS)
        connection.execute(AGE)
        jobs = connection.execute("SELECT id FROM outbox.job").fetchall()
    shown = [f"/messages/{row}" for row in (head, long, *waiting, discarded)] + [f"/jobs/{job}" for (job,) in jobs]
    return [*shown, f"/restore?id={discarded}&discarded=true"]
