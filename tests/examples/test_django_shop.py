"""examples/django_shop: its tests pass by the kit alone, and turn red for each common mistake."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "django_shop"

ATOMIC = "@transaction.atomic\n"
PLACE = """def place_order(customer: int, amount: Decimal) -> Order:
    \"\"\"Write an order and its event: both, or neither.\"\"\"
"""
CREATE = "    order = Order.objects.create(customer=customer, amount=amount)\n"
ADD = "    add(connection, OrderPlaced(order=order.pk, customer=customer, amount=amount))\n"
EARLY = "    add(connection, OrderPlaced(order=1, customer=customer, amount=amount), autocommit=True)\n"
EXECUTE = "    await inbox.execute(ADD_UP, [placed.customer, placed.amount])\n"
OUTSIDE = (
    "    async with await psycopg.AsyncConnection.connect(inbox.info.dsn, password=inbox.info.password) as other:\n"
    "        await other.execute(ADD_UP, [placed.customer, placed.amount])\n"
)

# What is a mistake, the code it stands for, the code with it, and what the kit says.
MISTAKES = [
    ("the event is forgotten", ADD, "", "was written 0 times, not 1"),
    ("there is no transaction", ATOMIC, "", "NoTransactionError"),
    (
        "the event is committed before the change",
        f"{ATOMIC}{PLACE}{CREATE}{ADD}",
        f"{PLACE}{EARLY}{CREATE}",
        "ERROR: test_an_order_that_the_table_refuses_has_no_event",
    ),
    ("another type", '@event("OrderPlaced"', '@event("OrderCreated"', "was written 0 times, not 1"),
    ("another key", 'key=("customer", "customer")', 'key=("order", "order")', "was written 0 times, not 1"),
    ("an effect outside of the transaction", EXECUTE, OUTSIDE, "FAIL: test_a_handler_that_fails_leaves_nothing"),
]


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> Iterator[str]:
    """A database whose test database Django makes once, and keeps for the next tests."""
    url = postgres.create_database("django_shop")
    yield url
    postgres.drop_database("django_shop")
    postgres.drop_database("test_django_shop")


def run_tests(folder: Path, url: str, right: str = "", wrong: str = "") -> tuple[int, str]:
    """Run the tests of a copy of the example in which a code is replaced."""
    copy = folder / "django_shop"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = (copy / "shop" / "orders.py").read_text()
    assert right in code
    (copy / "shop" / "orders.py").write_text(code.replace(right, wrong))
    done = subprocess.run(
        [sys.executable, "-W", "error", "manage.py", "test", "--keepdb", "--noinput"],
        env={**os.environ, "RELAY_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=copy,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def test_its_tests_pass(url: str, tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, url)

    assert code == 0, output
    assert "Ran 8 tests" in output


@pytest.mark.parametrize(("mistake", "right", "wrong", "says"), MISTAKES, ids=[mistake for mistake, *_ in MISTAKES])
def test_its_tests_see(mistake: str, right: str, wrong: str, says: str, url: str, tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, url, right, wrong)

    assert code == 1, output
    assert says in output
