"""Changes of dead letters, each written to the audit."""

from collections.abc import Sequence
from typing import Any

import psycopg

from relay.operate.letters.audit import Entry, write_audit
from relay.operate.letters.change import Command, Done
from relay.operate.letters.letter import Letter, Selection
from tests.consume.effects import QUEUE
from tests.dead_letters.letters import DEAD, NO_FILTER, Letters

RETRY = Entry("retry", DEAD, QUEUE, "ann@desk", "the tax office is open again")
DISCARD = Entry("discard", DEAD, None, "ann@desk", "test data")
AUDIT = "SELECT * FROM outbox.dead_letter_audit ORDER BY id"

Audit = psycopg.Connection[dict[str, Any]]


async def change(
    letters: Letters, entry: Entry, audit: Audit, selection: Selection = NO_FILTER, **options: Any
) -> Done:
    def write(done: Sequence[Letter]) -> None:
        write_audit(audit, "outbox", entry, done)

    return await Command(letters.broker, entry, selection, **{"write": write, **options}).run()
