"""What becomes of rows that a job lets go: they are sent, or parked again."""

import threading
from collections.abc import Callable

import psycopg


class Settler:
    """Settles what becomes pending, as a relay does: sent, or parked again."""

    def __init__(self, url: str, fails: Callable[[int], bool]) -> None:
        self._url = url
        self._fails = fails
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_pending = 0

    def __enter__(self) -> "Settler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(0.01):
                pending = connection.execute("SELECT id FROM outbox.message WHERE state = 'pending' ORDER BY id")
                ids = [id_ for (id_,) in pending]
                self.most_pending = max(self.most_pending, len(ids))
                for id_ in ids:
                    self._settle(connection, id_)

    def _settle(self, connection: psycopg.Connection, id_: int) -> None:
        if self._fails(id_):
            connection.execute(
                "UPDATE outbox.message SET state = 'parked', parked_at = clock_timestamp(), last_error = 'not again'"
                " WHERE id = %s",
                [id_],
            )
        else:
            connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = %s", [id_])
