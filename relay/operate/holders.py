"""Who keeps dead rows from being cleared away, for `relay status`: a prepared transaction may be an orphan."""

import psycopg

from relay.engine.horizon import HELD_LONG, HOLDERS, Holder


def long_holders(connection: psycopg.Connection) -> list[Holder]:
    """Give who has done so for long, as far as we may see his age; nobody where the views are closed to us."""
    try:
        found = [Holder(*row) for row in connection.execute(HOLDERS)]
    except psycopg.errors.InsufficientPrivilege:
        return []
    return [holder for holder in found if (holder.age_s or 0) >= HELD_LONG]
