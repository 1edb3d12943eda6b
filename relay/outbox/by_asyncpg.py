"""The writer for asyncpg's own connections."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from relay.outbox import insert, watch
from relay.outbox.row import NewRow

if TYPE_CHECKING:
    from relay.outbox.write import AsyncpgConnection


async def write(connection: "AsyncpgConnection", rows: Sequence[NewRow], schema: str, *, autocommit: bool) -> None:
    if not rows:
        return
    if not autocommit and not connection.is_in_transaction():
        raise watch.no_transaction()
    statement = _statement(schema)
    try:
        for batch in insert.batches(rows):
            await connection.execute(statement, *map(list, zip(*batch, strict=True)))
    except Exception as error:
        insert.note_remedy(error, schema)
        raise


@lru_cache
def _statement(schema: str) -> str:
    # By arrays also for one row: its JSON is text there, whatever codec the application has set for json and jsonb.
    places = {column: f"${number}" for number, column in enumerate(NewRow._fields, 1)}
    return insert.INSERT_SEVERAL.format(schema=insert.quoted(schema), **places)
