"""A ledger of Spark with a batch that was begun in pieces and two that are committed."""

WRITE = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts, committed_at)
    SELECT name, version, piece, 4, gen_random_uuid(), counts::jsonb,
        timestamptz '2026-11-21 08:00Z' + age * interval '1 h'
    FROM (VALUES ('nightly', 7, -2, 0, '{"table": "billing.invoice"}'), ('nightly', 7, 0, 1, '{"rows": 5}'),
        ('nightly', 7, 2, 2, '{"rows": 6}'), ('daily', 1, -2, 3, '{}'), ('daily', 1, 0, 4, '{"rows": 9}'),
        ('daily', 1, -1, 5, '{"rows": 9, "table": "billing.invoice", "messages": 9, "seconds": 70, "repeats": 2}'),
        ('daily', 2, -1, 4, '{"rows": "<many>"}')) AS made (name, version, piece, age, counts)
"""
AUDIT = "SELECT command, target, done_by, why FROM outbox.operator_audit"
