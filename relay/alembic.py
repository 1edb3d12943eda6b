"""Two hooks that keep the outbox out of an application's own Alembic migrations.

`relay migrate` makes the outbox's tables and changes them; its relays make a partition each day. Without the hooks,
`alembic revision --autogenerate` proposes to drop them all, and `alembic check` fails. In the application's env.py:

    from relay.alembic import include_name, include_object

    context.configure(
        connection=connection,
        target_metadata=target_metadata,
        include_schemas=True,
        include_name=include_name,
        include_object=include_object,
    )

For tables in another schema than `outbox`: `include_name=partial(include_name, schema="events")`, and so for the other
hook. Alembic calls the connection's default schema `None`: `schema=None` is for tables that are there.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.runtime.environment import NameFilterParentNames, NameFilterType
    from sqlalchemy.schema import SchemaItem

__all__ = ["include_name", "include_object"]

INFO = "outbox-relay"  # in the `info` of a mapped table that belongs to the relay, whatever its schema

# tests/migrations/test_alembic.py compares with the tables that `relay migrate` makes.
OURS = re.compile(
    r"migration|node|lane_floor|lane_pause|published|batch|quarantine|quarantine_released"
    r"|operator_audit|api_answer|console_history|dead_letter_audit|archived_day|inbox_memory"
    r"|job|job_(failure|row)|failure|parked_failure|replay|replay_failure|pool|pool_(member|partition|master)"
    r"|held_message|begun_message|consumer_queue"
    r"|message|message_(pending|parked|quarantined|discarded|archived|sent)"
    r"|processed_message|processed_message_undated"
    r"|(message_sent|processed_message)_[0-9]{8}"
)
# A Spark job's, in the schema that its option stagingSchema names.
STAGING = re.compile(r"staging_[0-9]{10}_[0-9a-f]{12}_[0-9a-f]{10}(_[0-9]+)?")


def include_name(
    name: str | None,
    type_: "NameFilterType",
    parent_names: "NameFilterParentNames",
    *,
    schema: str | None = "outbox",
) -> bool:
    """Return whether Alembic may read what has this name: False for a table of the relay, with all that belongs to it.

    The application's own tables are read, also those in the outbox's schema.
    """
    return type_ != "table" or not _is_ours(parent_names.get("schema_name"), name, schema)


def include_object(
    object_: "SchemaItem",
    name: str | None,
    type_: str,
    _reflected: bool,
    _compare_to: "SchemaItem | None",
    *,
    schema: str | None = "outbox",
) -> bool:
    """Return whether Alembic may compare this object: False for a table of the relay in the application's metadata.

    The table of `relay.outbox.OutboxMessage` is known in every metadata and schema.
    """
    if type_ != "table":
        return True
    return INFO not in object_.info and not _is_ours(getattr(object_, "schema", None), name, schema)


def _is_ours(found_in: str | None, name: str | None, schema: str | None) -> bool:
    if name is None:
        return False
    return STAGING.fullmatch(name) is not None or (found_in == schema and OURS.fullmatch(name) is not None)
