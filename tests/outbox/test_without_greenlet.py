"""Who writes by a synchronous session of SQLAlchemy needs no greenlet, which only its asynchronous part needs."""

import subprocess
import sys

from tests.outbox.conftest import MessageTable

PROGRAM = """if True:
    import sys
    sys.modules["greenlet"] = None  # as if it were not installed
    import sqlalchemy as sa
    from sqlalchemy.orm import Session
    from relay.outbox import Event, OutboxMessage, add
    from relay.testing import Outbox

    engine = sa.create_engine(sys.argv[1].replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        add(session, Event("customer", "17", "First", {}))
        session.add(OutboxMessage(Event("customer", "17", "Second", {})))
        session.flush()
        Outbox(session).assert_written("First")
    try:
        add(engine, Event("customer", "17", "Third", {}))
    except TypeError as error:
        print(error)
"""


def test_a_synchronous_session_needs_no_greenlet(module_url: str, table: MessageTable) -> None:
    command = [sys.executable, "-c", PROGRAM, module_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sqlalchemy.engine.base.Engine is no connection or session")
    assert [row["event_type"] for row in table.rows()] == ["First", "Second"]
