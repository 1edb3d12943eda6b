"""Rows that the broker has confirmed, and whose mark was lost with the session."""

from collections.abc import Iterable

from relay.engine.row import Row

REMEMBERED = 50_000  # rows; a window has far fewer


class Unmarked:
    """Remembers them: read again, they are marked without being sent again."""

    def __init__(self) -> None:
        self._message_ids: dict[int, bytes] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self._message_ids)

    def remember(self, rows: Iterable[Row]) -> None:
        """Beside those of earlier sessions that ended before they were all read again."""
        self._message_ids |= {row.id: row.message_id for row in rows}
        for id_ in list(self._message_ids)[:-REMEMBERED]:  # some had been marked, and nobody asks for them any more
            del self._message_ids[id_]

    def part(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Give those of the rows that are remembered, which are not any more then, and the others."""
        confirmed: list[Row] = []
        others: list[Row] = []
        for row in rows:
            known = self._message_ids.pop(row.id, None) == row.message_id
            (confirmed if known else others).append(row)
        return confirmed, others
