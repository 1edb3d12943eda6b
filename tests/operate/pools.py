"""A pool whose second member is late."""

MEMBERS = """
    INSERT INTO outbox.pool (name, queue, check_in_timeout) VALUES ('totals', 'billing', 0.8);
    INSERT INTO outbox.pool_member (pool, name, unacknowledged) VALUES ('totals', 'a', 7);
    INSERT INTO outbox.pool_member (pool, name, checked_in_at) VALUES ('totals', 'b', now() - interval '1 minute');
    INSERT INTO outbox.pool_partition (pool, partition, epoch, member, wanted_by)
    VALUES ('totals', 0, 3, 'a', 'b'), ('totals', 1, 1, 'b', NULL), ('totals', 2, 0, NULL, NULL);
"""
