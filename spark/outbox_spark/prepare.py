"""What the driver does before any task runs: read options, tables, columns and ledger, and refuse what cannot be."""

import logging
from collections.abc import Mapping
from uuid import uuid4

import psycopg
from pyspark.sql.types import StructType

from outbox_spark.errors import OptionError, OutboxWriteError
from outbox_spark.fit import plan_write
from outbox_spark.ledger import Batch, read
from outbox_spark.options import read_options
from outbox_spark.plan import Save
from outbox_spark.session import connect, conninfo, one_line
from outbox_spark.staging import drop_aged, drop_attempts, drop_leftovers, make_pattern, name_staging
from outbox_spark.tables import describe, require_outbox

log = logging.getLogger("outbox_spark")


def prepare(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> tuple[Save, Batch | None]:
    """Give what executors and commit need, and the committed batch of that name when there is one.

    Raises:
        OptionError, TableError, ColumnError: with every fault that was found, by name.
    """
    options = read_options(given)
    if overwrite:
        raise OptionError("mode overwrite is refused: an outbox only takes events in; use mode('append')")
    info = conninfo(options.url, options.user, options.password)
    with connect(info) as connection:
        now = require_outbox(connection, options.outbox_schema, options.staging_schema)
        plan = plan_write(schema, describe(connection, options.dbtable), options)
        recognised = read(connection, options.outbox_schema, options.app_id, options.version)
        for name in drop_aged(connection, options.staging_schema, now=now, max_age=options.staging_max_age):
            log.warning("outbox: dropped %s.%s, which a dead batch had left", options.staging_schema, name)
        token = uuid4()
        staging = name_staging(options.staging_schema, now=now, batch_hash=options.batch_hash, token=token)
        if recognised is None:
            make_pattern(connection, staging, plan)
    return Save(token, info, options, plan, staging), recognised


def say_recognised(batch: Batch) -> None:
    """Warn, in the driver's log, that a batch is not written again."""
    log.warning("outbox: %s is in the ledger already: nothing is written", batch)


def clean_after(save: Save) -> None:
    """Drop what other attempts at the committed batch have staged. A failure is logged: the batch is written."""
    try:
        with connect(save.info) as connection:
            drop_attempts(connection, save.staging, patience="500ms")
            drop_leftovers(connection, save.staging.schema, batch_hash=save.options.batch_hash)
    except (OutboxWriteError, psycopg.Error) as error:
        log.warning("outbox: staging tables of the committed batch are left to go by age: %s", one_line(error))
