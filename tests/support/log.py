"""Let writers write into the log."""

import psycopg

ENSURE = "SELECT outbox.ensure_segments(%s, %s)"
SWITCH = "ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written'"


def use_log(url: str, *, ahead: int = 2, size: int = 1 << 20) -> None:
    """Make segments, and set the default of `state` as the switch does."""
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(ENSURE, [ahead, size]).fetchone() != (None,):
            pass
        connection.execute(SWITCH)
