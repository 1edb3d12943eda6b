"""The keys that have a row under way."""

from collections.abc import Callable, Iterable

from relay.engine.row import Key, Row, key_of


class InFlightKeys(dict[Key, list[Row] | None]):
    """A key with a row under way -> the rows that wait for it, in order."""

    def take(self, rows: Iterable[Row]) -> list[Row]:
        """Give the rows that may go now; the others wait behind that of their key which is under way."""
        heads: list[Row] = []
        for row in rows:
            if (key := key_of(row))[1] is not None:
                if key in self:
                    waiting = self[key]
                    if waiting is None:
                        self[key] = [row]
                    else:
                        waiting.append(row)
                    continue
                self[key] = None
            heads.append(row)
        return heads

    def next_of(self, key: Key) -> Row | None:
        """The row under way is done with: give the one behind it, which is under way now."""
        waiting = self.pop(key)
        if waiting is None:
            return None
        row = waiting.pop(0)
        self[key] = waiting or None
        return row

    def withdraw(self, matches: Callable[[Row], bool], *, with_followers: bool) -> list[Row]:
        """Give the waiting rows that match, and those behind them if wanted; they wait no more."""
        found: list[Row] = []
        for key, waiting in self.items():
            first = next((n for n, row in enumerate(waiting or ()) if matches(row)), None)
            if waiting is None or first is None:
                continue
            if with_followers:
                found += waiting[first:]
                self[key] = waiting[:first] or None
            else:
                found += [row for row in waiting if matches(row)]
                self[key] = [row for row in waiting if not matches(row)] or None
        return found
