"""Files for other programs that come with this release: inside the installed package, or next to it in a checkout."""

import re
from pathlib import Path

import relay
from relay.errors import UsageError
from relay.operate.reference import example

_PACKAGE = Path(relay.__file__).parent
FILES = _PACKAGE if (_PACKAGE / "config" / "roles.sql").is_file() else _PACKAGE.parent

# pyproject.toml names each file of config/ that goes into the wheel; a folder could hold passwords.
EXAMPLES = {
    "relay.toml": "every setting with its default, as comments",
    "compose.yaml": "Docker Compose: PostgreSQL, RabbitMQ, logins, tables, roles and a relay; takes the next two",
    "compose-relay.toml": "the settings of this relay: one queue that gets every event",
    "compose-logins.sql": "the logins of this PostgreSQL",
    "rabbitmq/rabbitmq.conf": "a broker for production",
    "deployment.yaml": "relays on Kubernetes, with probes and secrets",
    "spark-application.yaml": "the archive on Kubernetes, for the Spark operator",
    "invoices/README.md": "a projection, written once for each invoice: how to run it",
    "invoices/relay.toml": "its topology",
    "invoices/worker.py": "its consumer",
    "invoices/issue.sql": "invoices with their events, for it",
    "durable/README.md": "measurements published outside of transactions: how to run it",
    "durable/relay.toml": "its topology",
    "durable/producer.py": "its publisher",
    "durable/consumer.py": "its consumer",
    "partitions/README.md": "totals kept by several processes: how to run it",
    "partitions/relay.toml": "its topology",
    "partitions/member.py": "its consumer",
    "partitions/totals.sql": "its table",
    "shop/README.md": "a web application with its tests: how to run it",
    "shop/relay.toml": "its topology",
    "shop/app.py": "FastAPI and SQLAlchemy, with a consumer in its lifespan",
    "shop/test_app.py": "its tests, without a broker",
    "django_shop/README.md": "a project in Django with its tests: how to run it",
    "django_shop/relay.toml": "its topology",
    "django_shop/manage.py": "its commands",
    "django_shop/settings.py": "its settings, with the app `relay.django`",
    "django_shop/urls.py": "its addresses",
    "django_shop/shop/__init__.py": "its app",
    "django_shop/shop/models.py": "its tables",
    "django_shop/shop/migrations/__init__.py": "its migrations",
    "django_shop/shop/migrations/0001_initial.py": "the first one, which makes the outbox's tables, too",
    "django_shop/shop/orders.py": "orders with their events, and a handler that adds them up",
    "django_shop/shop/views.py": "its pages",
    "django_shop/shop/management/commands/consume.py": "its consumer, as a command",
    "django_shop/shop/tests.py": "its tests, without a broker",
    "flask_shop/README.md": "a shop in Flask with its tests: how to run it",
    "flask_shop/relay.toml": "its topology",
    "flask_shop/app.py": "orders with their events, and events without a transaction",
    "flask_shop/test_app.py": "its tests",
    "celery_shop/README.md": "tasks of Celery that write events: how to run them",
    "celery_shop/relay.toml": "their topology",
    "celery_shop/tasks.py": "a task that may run twice, and writes its event once",
    "celery_shop/test_tasks.py": "their tests",
    "faststream_totals/README.md": "a consumer in FastStream, without relay.consume: how to run it",
    "faststream_totals/relay.toml": "its topology",
    "faststream_totals/app.py": "totals, each message added once",
    "faststream_totals/test_app.py": "its tests, on real servers",
    "node/README.md": "a writer and a consumer in Node: how to run them",
    "node/relay.toml": "their topology",
    "node/package.json": "their packages",
    "node/package-lock.json": "the versions of these",
    "node/writer.mjs": "orders with their events, by pg",
    "node/consumer.mjs": "totals, each message added once, by amqplib and pg",
    "node/test_node.py": "their tests, on real servers",
    "pipeline/invoices.py": "invoices of a file of purchases, by Spark (docs/pipeline.md)",
    "pipeline/billing.sql": "its tables",
    "pipeline/daily.py": "purchases billed day by day, by Spark (docs/pipeline.md)",
    "pipeline/sales.sql": "its tables",
    "pipeline/sales.py": "what a day comes to, for it",
    "pipeline/sales_tests.py": "the data tests of a day, for it",
    "pipeline/purchases.py": "how both read the file",
}
EXAMPLES_FOLDER = FILES / "examples"
JOBS = (_PACKAGE.parent if FILES is _PACKAGE else FILES / "spark") / "outbox_spark" / "jobs"
DASHBOARDS = FILES / "config" / "grafana"
RUNBOOKS = FILES / "docs" / "runbooks"
PLACEHOLDER = "https://relay.example.org"  # of the console, in the rules


def roles(schema: str) -> str:
    """Return config/roles.sql for the tables in `schema`, whose roles are then `<schema>_writer` and so on."""
    return re.sub(r"\boutbox", schema, _text(FILES / "config" / "roles.sql"))


def alerts(console: str | None = None) -> str:
    """Return the rules for Prometheus.

    Args:
        console: the address of the console, to whose runbooks the alerts lead.
    """
    rules = _text(FILES / "config" / "prometheus" / "alerts.yml")
    return rules if console is None else rules.replace(PLACEHOLDER, console.rstrip("/"))


def runbook(name: str) -> str | None:
    """Return the page of this name, as Markdown; None if it is missing."""
    return next((_text(file) for file in RUNBOOKS.glob("*.md") if file.stem == name), None)


def example_file(name: str) -> str:
    """Return the text of one of EXAMPLES.

    Raises:
        UsageError: there is no file of this name.
    """
    if name not in EXAMPLES:
        raise UsageError(f"there is no example {name}: `relay config examples` lists them")
    if name == "relay.toml":
        return example()
    return _text(next(file for folder in ("config", "examples") if (file := FILES / folder / name).is_file()))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
