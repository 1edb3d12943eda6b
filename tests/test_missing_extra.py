"""An import whose libraries were not installed names the extra that brings them."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("library", "use", "extra"),
    [
        ("aiormq", "import relay.consume", "consume"),
        ("aiormq", "from relay.publisher import DurablePublisher", "publisher"),
        ("sqlalchemy", "from relay.outbox import OutboxMessage", "sqlalchemy"),
        ("sqlalchemy", "from relay.consume import Inbox; Inbox(object(), 'projection')", "sqlalchemy"),
        ("prometheus_client", "import relay.probes.consumer", "consume"),
        ("pydantic", "import relay.config.settings", "publisher"),
        ("pydantic", "import relay.config.secret", "publisher"),
        ("pydantic", "import relay.servers.postgres.database", "publisher"),
        ("structlog", "import relay.observe.log", "publisher"),
        ("aiormq", "from relay.testing import Harness", "consume"),
        ("aiormq", "from relay.testing import message", "consume"),
        ("alembic", "from relay.testing import migrate; migrate('')", "testing"),
        ("pydantic", "from relay.testing import assert_compatible", "testing"),
        ("pydantic", "from relay.testing import migrate; migrate('')", "testing"),
        ("pydantic", "from relay.outbox import event; event('InvoiceIssued', key=('customer', None))", "events"),
        ("django", "import relay.django", "django"),
        ("django", "import relay.testing.django", "django"),
        ("pydantic", "import relay.config.loading", "relay"),
        ("pyarrow", "import sys; sys.path.insert(0, 'spark'); import outbox_spark", "spark-cluster"),
        ("pyspark", "import sys; sys.path.insert(0, 'spark'); import outbox_spark", "spark"),
        ("cyclopts", "import relay.cli; sys.exit(relay.cli.main(['config', 'show']))", "relay"),
        ("pydantic", "import relay.cli; sys.exit(relay.cli.main(['events', 'list', 'app.events']))", "relay"),
        ("fastapi", "import relay.cli; sys.exit(relay.cli.main(['console']))", "console"),
        ("argon2", "import relay.cli; sys.exit(relay.cli.main(['console', 'user', 'list', '--file', 'x']))", "console"),
    ],
)
def test_an_import_without_its_extra_names_the_extra(library: str, use: str, extra: str) -> None:
    program = f"import sys; sys.modules['{library}'] = None; {use}"  # as if it were not installed

    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == (2 if "relay.cli" in use else 1)
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f'{library} is not installed: pip install "outbox-relay[{extra}]"'), done.stderr


def test_without_the_console_the_other_commands_are_completed() -> None:
    program = "import sys; sys.modules['fastapi'] = sys.modules['argon2'] = None; import relay.cli; "
    program += "sys.exit(relay.cli.main(['completion', 'bash']))"

    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_without_sqlalchemy_what_is_no_connection_is_still_a_type_error() -> None:
    program = """if True:
        import sys
        sys.modules["sqlalchemy"] = None
        from relay.outbox import Event, add
        add(object(), Event("customer", "17", "InvoiceIssued", {}))
    """

    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    last = done.stderr.splitlines()[-1]
    assert last == "TypeError: builtins.object is no connection or session of psycopg 3, SQLAlchemy, asyncpg or Django"
