"""`relay events`: what it finds in an application's modules, what it prints, and what it exits with."""

import json
from pathlib import Path
from shutil import rmtree

import pytest

from tests.cli.command import PASSWORD, Command, Result

APPLICATION = """
from decimal import Decimal
from pydantic import BaseModel
from relay.outbox import event

print("imported")

class Line(BaseModel):
    amount: {amount}

@event("InvoiceIssued", version=2, key=("customer", "customer_id"))
class InvoiceIssued(BaseModel):
    customer_id: int
    lines: list[Line]
{more}
"""
PAID = """
@event("InvoicePaid", key=("invoice", None))
class InvoicePaid(BaseModel):
    invoice: int
"""
LISTED = """
[[topology.queues]]
name = "invoices"
[[topology.bindings]]
exchange = "outbox"
queue = "invoices"
routing_key = "customer.#"
"""


class Application(Command):
    """`relay events` in the folder of an application."""

    def write(self, amount: str = "int", more: str = "", name: str = "events.py") -> None:
        (self.folder / "app").mkdir(exist_ok=True)
        # Python knows a module that was compiled by its second and its size, and both may be the same.
        rmtree(self.folder / "app" / "__pycache__", ignore_errors=True)
        (self.folder / "app" / name).write_text(APPLICATION.format(amount=amount, more=more))

    def events(self, command: str, *arguments: str) -> Result:
        return self.process("events", command, *arguments)


@pytest.fixture
def application(tmp_path: Path) -> Application:
    made = Application(tmp_path)
    made.write()
    return made


def test_the_list_has_each_event_with_the_way_of_its_messages(application: Application) -> None:
    application.write(more=PAID)
    (application.folder / "relay.toml").write_text(LISTED)

    told = application.events("list", "app.events")

    assert (told.code, told.err) == (0, "imported\n")
    assert told.out.splitlines() == [
        "event type\tversion\taggregate type\taggregate id\tclass\texchange\trouting key\tqueues",
        "InvoiceIssued\t2\tcustomer\tcustomer_id\tapp.events:InvoiceIssued\toutbox\tcustomer.InvoiceIssued\tinvoices",
        "InvoicePaid\t\tinvoice\t\tapp.events:InvoicePaid\toutbox\tinvoice.InvoicePaid\t",
    ]


def test_a_class_that_two_modules_name_is_one_event(application: Application) -> None:
    (application.folder / "app" / "handlers.py").write_text("from app.events import InvoiceIssued")

    told = application.events("list", "app.events", "app.handlers", "--output", "json")

    (found,) = json.loads(told.out)
    assert (found["class"], found["queues"]) == ("app.events:InvoiceIssued", [])


def test_an_export_is_the_same_text_in_a_file_and_each_time(application: Application) -> None:
    printed = application.events("export", "app.events")
    written = application.events("export", "app.events", "--file", "main.json")

    assert (printed.code, written.code, written.out) == (0, 0, "")
    assert printed.out == (application.folder / "main.json").read_text()
    assert json.loads(printed.out)["events"][0]["written"]["required"] == ["customer_id", "lines"]


def test_asyncapi_has_the_queue_that_takes_the_messages(application: Application) -> None:
    (application.folder / "relay.toml").write_text(LISTED)

    described = json.loads(application.events("export", "app.events", "--format", "asyncapi").out)

    assert described["operations"]["receive.queue_invoices"]["messages"] == [
        {"$ref": "#/channels/queue_invoices/messages/InvoiceIssued_version_2"}
    ]


@pytest.mark.parametrize(
    ("now", "verdict", "codes"),
    [
        ("int", "FULL", {"backward": 0, "forward": 0, "full": 0}),
        ("float", "BACKWARD", {"backward": 0, "forward": 1, "full": 1}),
        ("bool", "NONE", {"backward": 1, "forward": 1, "full": 1}),
    ],
)
def test_the_exit_code_says_whether_what_is_required_holds(
    now: str, verdict: str, codes: dict[str, int], application: Application
) -> None:
    application.events("export", "app.events", "--file", "main.json")
    application.write(now)

    by_default = application.events("check", "app.events", "--against", "main.json")
    told = {
        each: application.events("check", "app.events", "--against", "main.json", "--require", each) for each in codes
    }

    assert by_default.code == codes["backward"]
    assert {each: result.code for each, result in told.items()} == codes
    assert all(result.out.splitlines()[1].startswith(f"{verdict}\tInvoiceIssued\t2\t") for result in told.values())


def test_a_broken_event_is_told_with_the_reason_and_its_place(application: Application) -> None:
    application.events("export", "app.events", "--file", "main.json")
    application.write("str")

    told = application.events("check", "app.events", "--against", "main.json")

    assert told.out.splitlines()[1:] == [
        "NONE\tInvoiceIssued\t2\ta new reader, an old message: payload.lines[*].amount is integer, not string",
        "NONE\tInvoiceIssued\t2\tan old reader, a new message: payload.lines[*].amount is string, not integer",
    ]
    assert told.err.splitlines()[-1] == "relay: of 1 event, 1 not backward compatible with main.json"


def test_new_and_removed_events_are_told_and_a_removed_one_has_no_reader(application: Application) -> None:
    application.events("export", "app.events", "--file", "main.json")
    application.write(more=PAID)
    added = application.events("check", "app.events", "--against", "main.json", "--require", "full")
    application.events("export", "app.events", "--file", "main.json")
    application.write()
    removed = application.events("check", "app.events", "--against", "main.json", "-o", "json")

    assert (added.code, added.out.splitlines()[-1]) == (0, "NEW\tInvoicePaid\t\t")
    assert removed.code == 1
    assert [(each["event_type"], each["verdict"]) for each in json.loads(removed.out)] == [
        ("InvoiceIssued", "FULL"),
        ("InvoicePaid", "REMOVED"),
    ]


def test_another_aggregate_type_takes_another_route(application: Application) -> None:
    application.events("export", "app.events", "--file", "main.json")
    moved = (application.folder / "app" / "events.py").read_text().replace('("customer"', '("client"')
    (application.folder / "app" / "events.py").write_text(moved)

    told = application.events("check", "app.events", "--against", "main.json")

    assert told.code == 0
    assert told.out.splitlines()[1].startswith(
        "BACKWARD\tInvoiceIssued\t2\tan old reader, a new message: the aggregate"
    )


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("app.missing", "", "there is no module app.missing: run this in the folder from which Python imports it"),
        ("app/events.py", "", "there is no module app/events.py"),
        ("app.bad", "import missing_library", "app.bad cannot be imported: ModuleNotFoundError: No module named"),
        ("app.bad", "1 / 0", "module app.bad cannot be imported: ZeroDivisionError: division by zero ("),
        ("app.bad", "import os\nx = os.environ['NOPE']", "/app/bad.py, line 2)"),
        ("app.bad", "import json\n\njson.loads('')", "/app/bad.py, line 3)"),
        ("app.bad", "from relay.outbox import event\nevent('', key=())", "/app/bad.py, line 2)"),
        ("app.bad", "x = (", "module app.bad cannot be imported: SyntaxError"),
        ("app.bad", "import sys; sys.exit(0)", "module app.bad cannot be imported: SystemExit: 0"),
        ("app.bad", "x = 5", "module app.bad names no class that @event declares"),
        (
            "app.bad",
            APPLICATION.format(amount="int", more=PAID) + PAID.replace("class ", "class A"),
            "both declare InvoicePaid without a version",
        ),
        ("app.bad", f"raise ValueError('postgresql://u:{PASSWORD}@h/d')", "ValueError: postgresql://u:***@h/d"),
    ],
)
def test_a_module_without_events_is_refused(module: str, text: str, words: str, application: Application) -> None:
    (application.folder / "app" / "bad.py").write_text(text)

    told = application.events("list", module)

    assert (told.code, told.out) == (2, "")
    assert words in told.err.splitlines()[-1]


def test_a_file_that_cannot_be_written_or_read_is_named(application: Application) -> None:
    written = application.events("export", "app.events", "--file", "missing/main.json")
    read = application.events("check", "app.events", "--against", "main.json")

    assert (written.code, read.code) == (2, 2)
    assert written.err.splitlines()[-1] == "relay: file missing/main.json cannot be written: No such file or directory"
    assert read.err.splitlines()[-1] == "relay: file main.json cannot be read: No such file or directory"
