"""Bound the values by which one role's row ended the work of another role.

A console's `probes` of the largest number stopped a relay, which adds one. A pool member's infinite check-in ended the
master of all pools. Pages and commands ended at infinite moments of a route or a relay, and at lanes that are no
list. A job that pauses above a share that is no number ended its page.

Rows of `node` and `pool_member` that are out of bounds are deleted: relays and members write theirs again.

Made as the owner of the tables, whichever role migrates.

Lock: ACCESS EXCLUSIVE on node, quarantine, pool, pool_member, pool_partition and job for an instant, while their rows
are checked.
"""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None
oldest_release = "0.1.0"
drops = ()

AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = '{schema}.message'::regclass
"""

# NaN is above every number in PostgreSQL. An epoch grows by one for each assignment.
UP = """
LOCK TABLE {schema}.node, {schema}.quarantine, {schema}.pool, {schema}.pool_member, {schema}.pool_partition,
    {schema}.job;

DELETE FROM {schema}.node
WHERE NOT ({is_started_at} AND {is_heartbeat_at} AND {are_lanes} AND {are_reasons} AND {is_published_total});
ALTER TABLE {schema}.node
    ADD CONSTRAINT node_started_at CHECK ({is_started_at}),
    ADD CONSTRAINT node_heartbeat_at CHECK ({is_heartbeat_at}),
    ADD CONSTRAINT node_lanes CHECK ({are_lanes}),
    ADD CONSTRAINT node_reasons CHECK ({are_reasons}),
    ADD CONSTRAINT node_published_total CHECK ({is_published_total});

UPDATE {schema}.quarantine
SET probes = least(greatest(probes, 0), 999999), since = {since}, probed_at = {probed_at}, paused_at = {paused_at}
WHERE NOT (probes >= 0 AND probes < 1000000) OR (since, probed_at, paused_at)
    IS DISTINCT FROM ({since}, {probed_at}, {paused_at});
ALTER TABLE {schema}.quarantine
    ADD CONSTRAINT quarantine_probes CHECK (probes >= 0 AND probes < 1000000),
    ADD CONSTRAINT quarantine_since CHECK ({is_since}),
    ADD CONSTRAINT quarantine_probed_at CHECK ({is_probed_at}),
    ADD CONSTRAINT quarantine_paused_at CHECK ({is_paused_at});

UPDATE {schema}.pool SET check_in_timeout = least(greatest(check_in_timeout, 0.01), 86400)
WHERE NOT (check_in_timeout >= 0.01 AND check_in_timeout <= 86400);
ALTER TABLE {schema}.pool
    ADD CONSTRAINT pool_check_in_timeout CHECK (check_in_timeout >= 0.01 AND check_in_timeout <= 86400);

DELETE FROM {schema}.pool_member WHERE NOT ({is_joined_at} AND {is_checked_in_at});
ALTER TABLE {schema}.pool_member
    ADD CONSTRAINT pool_member_joined_at CHECK ({is_joined_at}),
    ADD CONSTRAINT pool_member_checked_in_at CHECK ({is_checked_in_at});

DELETE FROM {schema}.pool_partition WHERE partition NOT BETWEEN 0 AND 15;
UPDATE {schema}.pool_partition SET epoch = least(greatest(epoch, 0), 4611686018427387903), since = {since}
WHERE NOT (epoch >= 0 AND epoch < 4611686018427387904) OR since IS DISTINCT FROM {since};
ALTER TABLE {schema}.pool_partition
    ADD CONSTRAINT pool_partition_partition CHECK (partition BETWEEN 0 AND 15),
    ADD CONSTRAINT pool_partition_epoch CHECK (epoch >= 0 AND epoch < 4611686018427387904),
    ADD CONSTRAINT pool_partition_since CHECK ({is_since});

UPDATE {schema}.job SET stages = NULL WHERE NOT ({are_stages});
UPDATE {schema}.job SET stop_when_failing = least(greatest(stop_when_failing, 0), 1)
WHERE NOT (stop_when_failing >= 0 AND stop_when_failing <= 1);
ALTER TABLE {schema}.job
    ADD CONSTRAINT job_stages_list CHECK ({are_stages}),
    ADD CONSTRAINT job_stop_when_failing CHECK (stop_when_failing >= 0 AND stop_when_failing <= 1);
"""
FIRST, LAST = "'1970-01-01 00:00:00+00'::timestamptz", "'9000-01-01 00:00:00+00'::timestamptz"
MOMENTS = ("since", "probed_at", "paused_at", "joined_at", "checked_in_at", "started_at", "heartbeat_at")
BOUNDED = {
    # A list, which may be empty, and no table; no NULL in it.
    "are_lanes": "coalesce(array_ndims(lanes), 1) = 1 AND array_position(lanes, NULL) IS NULL",
    "are_reasons": "coalesce(array_ndims(reasons), 1) = 1 AND array_position(reasons, NULL) IS NULL",
    "are_stages": "array_ndims(stages) = 1 AND array_position(stages, NULL) IS NULL AND 0 < ALL (stages)",
    "is_published_total": "published_total BETWEEN 0 AND 9007199254740992",
    # NULL stays NULL: `least` would leave it out.
    **{name: f"CASE WHEN {name} IS NOT NULL THEN least(greatest({name}, {FIRST}), {LAST}) END" for name in MOMENTS},
    **{f"is_{name}": f"{name} BETWEEN {FIRST} AND {LAST}" for name in MOMENTS},
}

DOWN = """
ALTER TABLE {schema}.node DROP CONSTRAINT node_started_at, DROP CONSTRAINT node_heartbeat_at,
    DROP CONSTRAINT node_lanes, DROP CONSTRAINT node_reasons, DROP CONSTRAINT node_published_total;
ALTER TABLE {schema}.quarantine DROP CONSTRAINT quarantine_probes, DROP CONSTRAINT quarantine_since,
    DROP CONSTRAINT quarantine_probed_at, DROP CONSTRAINT quarantine_paused_at;
ALTER TABLE {schema}.pool DROP CONSTRAINT pool_check_in_timeout;
ALTER TABLE {schema}.pool_member DROP CONSTRAINT pool_member_joined_at, DROP CONSTRAINT pool_member_checked_in_at;
ALTER TABLE {schema}.pool_partition DROP CONSTRAINT pool_partition_partition, DROP CONSTRAINT pool_partition_epoch,
    DROP CONSTRAINT pool_partition_since;
ALTER TABLE {schema}.job DROP CONSTRAINT job_stages_list, DROP CONSTRAINT job_stop_when_failing;
"""


def upgrade(schema: str) -> None:
    for script in (AS_OWNER, UP, "RESET ROLE"):
        op.execute(script.format(schema=schema, **BOUNDED))


def downgrade(schema: str) -> None:
    op.execute(DOWN.format(schema=schema))
